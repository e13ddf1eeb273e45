"""The infer call: an HTTP body -> `InferRequest`, `InferResponse` -> an HTTP body; JSON and binary tensors.

A binary body is a JSON header followed by the tensors' raw bytes, in the order of the inputs that carry
`binary_data_size`. Tensors are views of the body; an answer is a list of buffers that nobody joins here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Buffer, Tensor, decode_bytes_elements, tensor_to_bytes
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.exchange import HttpResponse
from modelserver.frontends.http.head import HeadReader, InputHead
from modelserver.frontends.http.json_tensor import tensor_from_json, tensor_to_json
from modelserver.frontends.http.request_parameters import apply_parameters
from modelserver.frontends.http.status import JSON_TYPE

HEADER_LENGTH = "inference-header-content-length"  # as `HttpRequest.headers` spells it

_BINARY_TYPE = ("Content-Type", "application/octet-stream")


@dataclass(slots=True)
class OutputForm:
    """How the caller wants its outputs: `listed` by name, `is_binary` for the others."""

    is_binary: bool = False
    listed: Mapping[str, bool] | None = None


def decode_infer(
    model_name: str, version: int | None, body: Buffer, header_length: int | None, reader: HeadReader
) -> tuple[InferRequest, OutputForm]:
    """Decode an infer call; `header_length` is the size of the JSON part (None: all of the body).

    The tensors of the request are views of `body`. Raises InvalidArgumentError, PayloadTooLargeError for
    what is over the reader's limits, UnsupportedError for extensions that this server does not have.
    """
    if header_length is None:
        header_length = len(body)
        head = reader.read(bytes(body))
    else:
        head = reader.recall(bytes(body[:header_length]))
    inputs: dict[str, Tensor] = {}
    offset = header_length
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
    is_binary = apply_parameters(request, head.parameters) if head.parameters else False
    return request, OutputForm(is_binary, head.listed)


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
