"""The infer call: an HTTP body -> `InFlightRequest`, `InferResponse` -> an HTTP body; JSON and binary tensors.

A binary body is a JSON header followed by the tensors' raw bytes, in the order of the inputs that carry
`binary_data_size`. Tensors are views of the body; an answer is a list of buffers that are not joined here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import orjson

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import Slices
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.template import VIEW_BYTES
from modelserver.core.tensor import (
    Buffer,
    Tensor,
    bytes_element_slices,
    decode_bytes_elements,
    placeholder,
    tensor_to_bytes,
)
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.head import InferCallHead, InputHead
from modelserver.frontends.http.json_tensor import check_has_json, tensor_from_json, tensor_slices, tensor_to_json
from modelserver.frontends.http.request_parameters import apply_parameters
from modelserver.protocol.response import JSON_HEADERS, HttpResponse

_BINARY_TYPE = ("Content-Type", "application/octet-stream")


class OutputForm(msgspec.Struct):
    """The encoding that the caller wants for its outputs: `listed` by name, `is_binary` for the others."""

    is_binary: bool = False
    listed: Mapping[str, bool] | None = None


def decode_infer(
    model_name: str, version: int | None, body: Buffer, head: InferCallHead, head_len: int
) -> tuple[InFlightRequest, OutputForm]:
    """Decode an infer call, of which `head` is the JSON and `head_len` its size.

    The tensors of the request are views of `body`. Raises InvalidArgumentError or UnsupportedError.
    """
    inputs: dict[str, Tensor] = {}
    offset = head_len
    for item in head.inputs:
        if item.num_bytes is None:
            inputs[item.name] = tensor_from_json(item.name, item.datatype, item.shape, item.count, item.data)
        else:
            inputs[item.name] = _binary_tensor(item, item.num_bytes, body, offset)
            offset += item.num_bytes
    if offset != len(body):
        raise _unexpected_data(model_name, len(body) - offset)
    return _request(model_name, version, head, inputs)


def outline_infer(model_name: str, version: int | None, head: InferCallHead) -> tuple[InFlightRequest, OutputForm]:
    """As `decode_infer`, without the elements: the inputs have shapes but no content."""
    for item in head.inputs:
        if item.num_bytes is None:
            check_has_json(item.name, item.datatype)
    inputs = {item.name: placeholder(item.name, item.datatype, item.shape) for item in head.inputs}
    return _request(model_name, version, head, inputs)


def element_slices(model_name: str, body: Buffer, head: InferCallHead, head_len: int) -> Slices[dict[str, Tensor]]:
    """The inputs of a call, as `decode_infer` makes them, in slices."""
    inputs: dict[str, Tensor] = {}
    offset = head_len
    for item in head.inputs:
        if item.num_bytes is None:
            known = (item.name, item.datatype, item.shape, item.count)
            if isinstance(item.data, memoryview):
                inputs[item.name] = yield from tensor_slices(*known, item.data)
            else:
                inputs[item.name] = tensor_from_json(*known, item.data)
                yield
        elif item.datatype.itemsize is None:
            raw = _binary_part(item, item.num_bytes, body, offset)
            elements = yield from bytes_element_slices(item.name, item.shape, raw)
            inputs[item.name] = Tensor(item.name, item.datatype, elements)
        else:
            inputs[item.name] = _binary_tensor(item, item.num_bytes, body, offset)
        offset += item.num_bytes or 0
    if offset != len(body):
        raise _unexpected_data(model_name, len(body) - offset)
    return inputs


def _request(
    model_name: str, version: int | None, head: InferCallHead, inputs: dict[str, Tensor]
) -> tuple[InFlightRequest, OutputForm]:
    request = InFlightRequest(model_name=model_name, version=version, inputs=inputs, id=head.id, outputs=head.outputs)
    request.transfer = head.transfer
    is_binary = apply_parameters(request, head.parameters) if head.parameters else False
    return request, OutputForm(is_binary, head.listed)


def _unexpected_data(model_name: str, num_bytes: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"unexpected additional input data for model '{model_name}': {num_bytes} bytes after the last binary input"
    )


def encode_infer(request: InFlightRequest, response: InferResponse, form: OutputForm) -> HttpResponse:
    """The answer for a response without error; outputs in the order in which they were requested.

    Raises InvalidArgumentError for an output that has no JSON form and was requested as JSON.
    """
    outputs = response.outputs
    names = request.outputs
    if not response.parameters and request.transfer is None:
        # The usual answers, on the hot path; the same bytes as below.
        listed = form.listed
        if len(outputs) == 1:
            output = outputs[0]
            if names is None or names == (output.name,):
                is_binary = form.is_binary if listed is None else listed.get(output.name, form.is_binary)
                return _encode_lone(request, output, is_binary=is_binary)
        elif outputs and names is None and listed is None:
            return (_encode_all_binary if form.is_binary else _encode_all_json)(request, outputs)
    if names is not None:
        by_name = {tensor.name: tensor for tensor in outputs}
        outputs = [by_name[name] for name in names if name in by_name]
    return _encode(request, outputs, response.parameters, form)


def encode_infer_event(request: InFlightRequest, response: InferResponse) -> bytes:
    """One of many responses as one line of JSON; its parameters tell whether more will follow, as over gRPC.

    Raises InvalidArgumentError for an output that has no JSON form.
    """
    parameters = {**(response.parameters or {}), "triton_final_response": response.is_final}
    return b"".join(_encode(request, response.outputs, parameters, OutputForm()).body)


def _encode(
    request: InFlightRequest,
    outputs: Sequence[Tensor],
    parameters: Mapping[str, ParameterValue] | None,
    form: OutputForm,
) -> HttpResponse:
    rows: list[bytes] = []
    blobs: list[Buffer] = []
    has_binary = False
    placed = request.transfer.placed if request.transfer is not None else ()
    listed = form.listed
    for tensor in outputs:
        row: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.data.shape}
        if tensor.name in placed:
            pass  # the client finds it in shared memory
        elif form.is_binary if listed is None else listed.get(tensor.name, form.is_binary):
            blob = tensor_to_bytes(tensor)
            row["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
            has_binary = True
        else:
            rows.append(b'%b,"data":' % orjson.dumps(row)[:-1])
            rows += (tensor_to_json(tensor), b"},")
            continue
        rows += (orjson.dumps(row), b",")
    document: dict[str, Any] = {"model_name": request.model_name, "model_version": str(request.version)}
    if request.id:
        document["id"] = request.id
    if parameters:
        document["parameters"] = dict(parameters)
    if rows:
        rows[-1] = rows[-1].removesuffix(b",")
    # A join of long text gives the interpreter's lock back while it copies.
    header = b"".join((orjson.dumps(document)[:-1], b',"outputs":[', *rows, b"]}"))
    if not has_binary:
        return HttpResponse(200, JSON_HEADERS, (header,))
    return HttpResponse(200, _binary_headers(len(header)), (header, *blobs))


def _encode_lone(request: InFlightRequest, output: Tensor, *, is_binary: bool) -> HttpResponse:
    """The answer with one output and no parameters."""
    data = output.data
    if is_binary:
        is_small = data.nbytes < VIEW_BYTES and output.datatype.itemsize is not None
        blob: Buffer = data.tobytes() if is_small else tensor_to_bytes(output)
        size = len(blob)
    else:
        blob, size = tensor_to_json(output), None
    header, headers, model, rest = _lone_header(
        request.model_name, request.version, output.name, output.datatype, data.shape, size
    )
    if request.id:
        header = b'%b,"id":%b%b' % (model, orjson.dumps(request.id), rest)
        if is_binary:
            headers = _binary_headers(len(header))
    return HttpResponse(200, headers, (header, blob) if is_binary else (header, blob, b"}]}"))


def _encode_all_binary(request: InFlightRequest, outputs: Sequence[Tensor]) -> HttpResponse:
    """The answer with several outputs, all binary, and no parameters."""
    blobs: list[Buffer] = []
    rows: list[tuple[str, Datatype, tuple[int, ...], int]] = []
    for output in outputs:
        data, datatype = output.data, output.datatype
        is_small = data.nbytes < VIEW_BYTES and datatype.itemsize is not None
        blob: Buffer = data.tobytes() if is_small else tensor_to_bytes(output)
        blobs.append(blob)
        rows.append((output.name, datatype, data.shape, len(blob)))
    header = b"".join((_start_of(request), _binary_rows(*rows), b"}"))
    return HttpResponse(200, _binary_headers(len(header)), (header, *blobs))


def _encode_all_json(request: InFlightRequest, outputs: Sequence[Tensor]) -> HttpResponse:
    """The answer with several outputs, all as JSON, and no parameters."""
    body: list[Buffer] = [_start_of(request), b',"outputs":[']
    for output in outputs:
        body += (_json_row(output.name, output.datatype, output.data.shape), tensor_to_json(output), b"},")
    body[-1] = b"}]}"
    return HttpResponse(200, JSON_HEADERS, tuple(body))


def _start_of(request: InFlightRequest) -> bytes:
    """The JSON of an answer up to and including the request's id."""
    start = _model_start(request.model_name, request.version)
    return b'%b,"id":%b' % (start, orjson.dumps(request.id)) if request.id else start


@lru_cache(maxsize=1024)
def _binary_headers(header_len: int) -> tuple[tuple[str, str], ...]:
    """The headers of an answer with binary tensors after that many bytes of JSON: one object for each number."""
    return (_BINARY_TYPE, ("Inference-Header-Content-Length", str(header_len)))


@lru_cache(maxsize=1024)
def _lone_header(
    model_name: str, version: int | None, name: str, datatype: Datatype, shape: tuple[int, ...], size: int | None
) -> tuple[bytes, tuple[tuple[str, str], ...], bytes, bytes]:
    """The text before the bytes of a lone output, or, without `size`, before its JSON elements, which `}]}` follows.

    Returns the whole, the headers of the answer, and the parts before and after the request's id.
    """
    model = _model_start(model_name, version)
    row: dict[str, Any] = {"name": name, "datatype": datatype.value, "shape": shape}
    row |= {"data": None} if size is None else {"parameters": {"binary_data_size": size}}
    rest = b',"outputs":[' + orjson.dumps(row) + b"]}"
    if size is None:
        rest = rest.removesuffix(b"null}]}")
    return model + rest, JSON_HEADERS if size is None else _binary_headers(len(model + rest)), model, rest


@lru_cache(maxsize=1024)
def _model_start(model_name: str, version: int | None) -> bytes:
    """The beginning of an answer's JSON."""
    return orjson.dumps({"model_name": model_name, "model_version": str(version)}).removesuffix(b"}")


@lru_cache(maxsize=1024)
def _binary_rows(*rows: tuple[str, Datatype, tuple[int, ...], int]) -> bytes:
    """The JSON that describes binary outputs; sizes are in bytes."""
    documents = [
        {"name": name, "datatype": datatype.value, "shape": shape, "parameters": {"binary_data_size": size}}
        for name, datatype, shape, size in rows
    ]
    return b',"outputs":' + orjson.dumps(documents)


@lru_cache(maxsize=1024)
def _json_row(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    """The text before the elements of an output."""
    row = {"name": name, "datatype": datatype.value, "shape": shape, "data": None}
    return orjson.dumps(row).removesuffix(b"null}")


def _binary_part(item: InputHead, num_bytes: int, body: Buffer, offset: int) -> memoryview:
    """The bytes of a binary input."""
    if offset + num_bytes > len(body):
        raise InvalidArgumentError(
            f"unexpected size for input '{item.name}', expecting {offset + num_bytes - len(body)} additional bytes "
            "for the model after the JSON (whose size is in the header Inference-Header-Content-Length)"
        )
    return memoryview(body)[offset : offset + num_bytes]


def _binary_tensor(item: InputHead, num_bytes: int, body: Buffer, offset: int) -> Tensor:
    raw = _binary_part(item, num_bytes, body, offset)
    datatype = item.datatype
    if datatype.itemsize is None:
        return Tensor(item.name, datatype, decode_bytes_elements(item.name, item.shape, raw))
    data = np.frombuffer(body, datatype.numpy, item.count, offset)
    if not data.flags.aligned:
        data = data.copy()  # backends may read it with aligned loads
    return Tensor(item.name, datatype, data.reshape(item.shape))
