"""The infer call: an HTTP body -> `InferRequest`, `InferResponse` -> an HTTP body; JSON and binary tensors.

A binary body is a JSON header followed by the tensors' raw bytes, in the order of the inputs that carry
`binary_data_size`. Tensors are views of the body; an answer is a list of buffers that nobody joins here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import orjson

from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.template import VIEW_BYTES
from modelserver.core.tensor import Buffer, Tensor, decode_bytes_elements, tensor_to_bytes
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.exchange import HttpResponse
from modelserver.frontends.http.head import InputHead, RequestHead
from modelserver.frontends.http.json_tensor import tensor_from_json, tensor_to_json
from modelserver.frontends.http.request_parameters import apply_parameters
from modelserver.frontends.http.status import JSON_HEADERS

_BINARY_TYPE = ("Content-Type", "application/octet-stream")


class OutputForm(msgspec.Struct):
    """How the caller wants its outputs: `listed` by name, `is_binary` for the others."""

    is_binary: bool = False
    listed: Mapping[str, bool] | None = None


def decode_infer(
    model_name: str, version: int | None, body: Buffer, head: RequestHead, head_len: int
) -> tuple[InferRequest, OutputForm]:
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
        raise InvalidArgumentError(
            f"unexpected additional input data for model '{model_name}': "
            f"{len(body) - offset} bytes after the last binary input"
        )
    request = InferRequest(model_name, version, inputs, head.id, head.outputs)
    request.transfer = head.transfer
    is_binary = apply_parameters(request, head.parameters) if head.parameters else False
    return request, OutputForm(is_binary, head.listed)


def encode_infer(request: InferRequest, response: InferResponse, form: OutputForm) -> HttpResponse:
    """The answer for a response without error; outputs in the order in which they were requested.

    Raises InvalidArgumentError for an output that has no JSON form and was requested as JSON.
    """
    outputs = response.outputs
    if len(outputs) == 1 and not response.parameters and request.transfer is None:
        # The usual answer, and the hot one; the same bytes as below.
        output = outputs[0]
        names = request.outputs
        if names is None or names == (output.name,):
            listed = form.listed
            is_binary = form.is_binary if listed is None else listed.get(output.name, form.is_binary)
            return _encode_lone(request, output, is_binary=is_binary)
    if request.outputs is not None:
        by_name = {tensor.name: tensor for tensor in outputs}
        outputs = [by_name[name] for name in request.outputs if name in by_name]
    return _encode(request, outputs, response.parameters, form)


def encode_infer_event(request: InferRequest, response: InferResponse) -> bytes:
    """One of many responses as one line of JSON; its parameters tell whether more will follow, as over gRPC.

    Raises InvalidArgumentError for an output that has no JSON form.
    """
    parameters = {**(response.parameters or {}), "triton_final_response": response.is_final}
    return b"".join(_encode(request, response.outputs, parameters, OutputForm()).body)


def _encode(
    request: InferRequest,
    outputs: Sequence[Tensor],
    parameters: Mapping[str, ParameterValue] | None,
    form: OutputForm,
) -> HttpResponse:
    rows: list[dict[str, Any]] = []
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
            row["data"] = orjson.Fragment(tensor_to_json(tensor))
        rows.append(row)
    document: dict[str, Any] = {"model_name": request.model_name, "model_version": str(request.version)}
    if request.id:
        document["id"] = request.id
    if parameters:
        document["parameters"] = dict(parameters)
    document["outputs"] = rows
    header = orjson.dumps(document)
    if not has_binary:
        return HttpResponse(200, JSON_HEADERS, (header,))
    return HttpResponse(200, _binary_headers(len(header)), (header, *blobs))


def _encode_lone(request: InferRequest, output: Tensor, *, is_binary: bool) -> HttpResponse:
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


@lru_cache(maxsize=1024)
def _binary_headers(header_len: int) -> tuple[tuple[str, str], ...]:
    """Those of an answer with binary tensors behind so many bytes of JSON: the same object for the same number."""
    return (_BINARY_TYPE, ("Inference-Header-Content-Length", str(header_len)))


@lru_cache(maxsize=1024)
def _lone_header(
    model_name: str, version: int | None, name: str, datatype: Datatype, shape: tuple[int, ...], size: int | None
) -> tuple[bytes, tuple[tuple[str, str], ...], bytes, bytes]:
    """What precedes the bytes of a lone output, or, without `size`, its JSON elements, which `}]}` follows.

    The whole, the headers of the answer, and what comes before and after the request's id.
    """
    model = orjson.dumps({"model_name": model_name, "model_version": str(version)}).removesuffix(b"}")
    row: dict[str, Any] = {"name": name, "datatype": datatype.value, "shape": shape}
    row |= {"data": None} if size is None else {"parameters": {"binary_data_size": size}}
    rest = b',"outputs":[' + orjson.dumps(row) + b"]}"
    if size is None:
        rest = rest.removesuffix(b"null}]}")
    return model + rest, JSON_HEADERS if size is None else _binary_headers(len(model + rest)), model, rest


def _binary_tensor(item: InputHead, num_bytes: int, body: Buffer, offset: int) -> Tensor:
    if offset + num_bytes > len(body):
        raise InvalidArgumentError(
            f"unexpected size for input '{item.name}', expecting {offset + num_bytes - len(body)} additional bytes "
            "after the JSON (whose size is in the header Inference-Header-Content-Length)"
        )
    datatype = item.datatype
    if datatype.itemsize is None:
        raw = memoryview(body)[offset : offset + num_bytes]
        return Tensor(item.name, datatype, decode_bytes_elements(item.name, item.shape, raw))
    data = np.frombuffer(body, datatype.numpy, item.count, offset)
    if not data.flags.aligned:
        data = data.copy()  # backends may read it with aligned loads
    return Tensor(item.name, datatype, data.reshape(item.shape))
