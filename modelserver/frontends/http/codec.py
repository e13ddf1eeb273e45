"""The infer call: an HTTP body -> `InferRequest`, `InferResponse` -> an HTTP body; JSON and binary tensors.

A binary body is a JSON header followed by the tensors' raw bytes, in the order of the inputs that carry
`binary_data_size`. Tensors are views of the body; an answer is a list of buffers that nobody joins here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np
import orjson

from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Buffer, Tensor, decode_bytes_elements, tensor_to_bytes
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, UnsupportedError
from modelserver.frontends.http.exchange import HttpResponse
from modelserver.frontends.http.json_tensor import tensor_from_json, tensor_to_json
from modelserver.frontends.http.json_text import check_depth, has_non_finite, parse_non_finite
from modelserver.frontends.http.limits import HttpLimits
from modelserver.frontends.http.request_parameters import apply_parameters, size_parameter
from modelserver.frontends.http.status import JSON_TYPE

HEADER_LENGTH = "inference-header-content-length"  # as `HttpRequest.headers` spells it

_BINARY_TYPE = ("Content-Type", "application/octet-stream")
_DATATYPES = {datatype.value: datatype for datatype in Datatype}
_MAX_TENSOR_BYTES = 2**63 - 1
_ABSENT = msgspec.Raw(b"")


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Any] | None = None
    data: msgspec.Raw = _ABSENT


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: Sequence[_Input]
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] | None = None
    id: str | None = None


class _ParsedInput(_Input):
    """An input whose `data` was parsed already, because of its NaN or Infinity tokens."""

    data: Any = None


class _ParsedRequest(_Request):
    inputs: Sequence[_ParsedInput]


_decode_request = msgspec.json.Decoder(_Request).decode


@dataclass(slots=True)
class OutputForm:
    """How the caller wants its outputs: `listed` by name, `is_binary` for the others."""

    is_binary: bool = False
    listed: Mapping[str, bool] | None = None


def decode_infer(
    model_name: str, version: int | None, body: Buffer, header_length: int | None, limits: HttpLimits
) -> tuple[InferRequest, OutputForm]:
    """Decode an infer call; `header_length` is the size of the JSON part (None: all of the body).

    The tensors of the request are views of `body`. Raises InvalidArgumentError, PayloadTooLargeError for
    what is over `limits`, UnsupportedError for extensions that this server does not have.
    """
    if header_length is None:
        header_length = len(body)
    parsed = _parse(body if header_length == len(body) else body[:header_length], limits.max_json_depth)
    outputs = parsed.outputs
    if len(parsed.inputs) > limits.max_tensors or (outputs and len(outputs) > limits.max_tensors):
        raise PayloadTooLargeError(f"the request has more than {limits.max_tensors} inputs or outputs")

    inputs: dict[str, Tensor] = {}
    offset = header_length
    for item in parsed.inputs:
        if item.name in inputs:
            raise InvalidArgumentError(f"input '{item.name}' already exists in request")
        size = None if not item.parameters else _binary_size(item)
        if size is None:
            inputs[item.name] = _json_tensor(item, limits)
        else:
            inputs[item.name] = _binary_tensor(item, size, body, offset, limits)
            offset += size
    if offset != len(body):
        raise InvalidArgumentError(
            f"unexpected additional input data for model '{model_name}': "
            f"{len(body) - offset} bytes after the last binary input"
        )
    request = InferRequest(model_name, version, inputs, parsed.id or "")
    form = OutputForm()
    if parsed.parameters:
        form.is_binary = apply_parameters(request, parsed.parameters)
    if outputs:
        request.outputs = tuple([output.name for output in outputs])
        form.listed = {output.name: _output_is_binary(output) for output in outputs}
    return request, form


def encode_infer(request: InferRequest, response: InferResponse, form: OutputForm) -> HttpResponse:
    """The answer for a response without error; outputs in the order in which they were requested.

    Raises InvalidArgumentError for an output that has no JSON form and was requested as JSON.
    """
    outputs = response.outputs
    if request.outputs is not None:
        by_name = {tensor.name: tensor for tensor in outputs}
        outputs = [by_name[name] for name in request.outputs if name in by_name]
    rows: list[dict[str, Any]] = []
    blobs: list[Buffer] = []
    has_binary = False
    listed = form.listed
    for tensor in outputs:
        row: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.data.shape}
        if form.is_binary if listed is None else listed.get(tensor.name, form.is_binary):
            blob = tensor_to_bytes(tensor)
            row["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
            has_binary = True
        else:
            row["data"] = tensor_to_json(tensor)
        rows.append(row)
    document: dict[str, Any] = {"model_name": request.model_name, "model_version": str(request.version)}
    if request.id:
        document["id"] = request.id
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    document["outputs"] = rows
    header = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not has_binary:
        return HttpResponse(200, [JSON_TYPE], (header,))
    lengths = ("Inference-Header-Content-Length", str(len(header)))
    return HttpResponse(200, [_BINARY_TYPE, lengths], (header, *blobs))


def _parse(text: Buffer, max_depth: int) -> _Request:
    """Parse the JSON part. Raises InvalidArgumentError, saying where."""
    if isinstance(text, memoryview):
        text = bytes(text)
    check_depth(text, max_depth)
    try:
        return _decode_request(text)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"the inference request is not valid: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not has_non_finite(text):
            raise InvalidArgumentError(f"the request's JSON is malformed: {error}") from error
    try:
        return msgspec.convert(parse_non_finite(text), _ParsedRequest)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"the inference request is not valid: {error}") from error


def _binary_size(item: _Input) -> int | None:
    """The bytes that the input has after the header; None when its data is JSON."""
    parameters = item.parameters or {}
    if "shared_memory_region" in parameters:
        raise UnsupportedError(
            f"input '{item.name}': this server has no shared memory regions; send the data as JSON or binary"
        )
    size = size_parameter(f"input '{item.name}'", parameters, "binary_data_size")
    if size is not None and _has_data(item):
        raise InvalidArgumentError(f"input '{item.name}': only one of 'data' and 'binary_data_size' may be set")
    return size


def _has_data(item: _Input) -> bool:
    data = item.data
    if data is _ABSENT or data is None:
        return False
    return not isinstance(data, msgspec.Raw) or bytes(memoryview(data)[:5]) != b"null"


def _datatype_and_count(item: _Input, limits: HttpLimits) -> tuple[Datatype, int]:
    """Check what an input says about itself; its datatype and its number of elements."""
    name, shape = item.name, item.shape
    datatype = _DATATYPES.get(item.datatype)
    if datatype is None:
        raise InvalidArgumentError(
            f"input '{name:.100}': unknown datatype '{item.datatype:.40}', expected one of {', '.join(_DATATYPES)}"
        )
    if len(name) > limits.max_name_len:
        raise InvalidArgumentError(f"an input's name is longer than {limits.max_name_len} characters: '{name[:40]}...'")
    if len(shape) > limits.max_rank:
        raise InvalidArgumentError(
            f"input '{name}': a shape has at most {limits.max_rank} dimensions, got {len(shape)}"
        )
    if shape and min(shape) < 0:
        raise InvalidArgumentError(f"input '{name}': invalid shape {list(shape)}, a dimension is at least 0")
    count = prod(shape)
    if (count or prod(filter(None, shape))) * 8 > _MAX_TENSOR_BYTES:
        raise InvalidArgumentError(f"input '{name}': shape {list(shape)} has more bytes than 64 bits can count")
    return datatype, count


def _json_tensor(item: _Input, limits: HttpLimits) -> Tensor:
    datatype, count = _datatype_and_count(item, limits)
    if not _has_data(item):
        raise InvalidArgumentError(
            f"input '{item.name}' has no data: set 'data', or the parameter 'binary_data_size' and append the bytes"
        )
    size = count * (datatype.itemsize or 4)
    if size > limits.max_body_bytes:
        raise PayloadTooLargeError(
            f"input '{item.name}': {size} bytes are over the limit of {limits.max_body_bytes} bytes; "
            "raise it with --http-max-input-size"
        )
    return tensor_from_json(item.name, datatype, item.shape, count, item.data)


def _binary_tensor(item: _Input, size: int, body: Buffer, offset: int, limits: HttpLimits) -> Tensor:
    datatype, count = _datatype_and_count(item, limits)
    if offset + size > len(body):
        raise InvalidArgumentError(
            f"unexpected size for input '{item.name}', expecting {offset + size - len(body)} additional bytes "
            "after the JSON (whose size is in the header Inference-Header-Content-Length)"
        )
    if datatype.itemsize is None:
        raw = memoryview(body)[offset : offset + size]
        return Tensor(item.name, datatype, decode_bytes_elements(item.name, item.shape, raw))
    if count * datatype.itemsize != size:
        raise InvalidArgumentError(
            f"input '{item.name}': expected {count * datatype.itemsize} bytes for shape {list(item.shape)} "
            f"of {datatype.value}, got {size}"
        )
    data = np.frombuffer(body, datatype.numpy, count, offset)
    if not data.flags.aligned:
        data = data.copy()  # backends may read it with aligned loads
    return Tensor(item.name, datatype, data.reshape(item.shape))


def _output_is_binary(output: _Output) -> bool:
    parameters = output.parameters
    if not parameters:
        return False
    for name, what in (("shared_memory_region", "shared memory regions"), ("classification", "classification")):
        if name in parameters:
            raise UnsupportedError(f"output '{output.name}': this server does not have {what} yet")
    is_binary = parameters.get("binary_data", False)
    if not isinstance(is_binary, bool):
        raise InvalidArgumentError(f"output '{output.name}': parameter 'binary_data' must be a boolean")
    return is_binary
