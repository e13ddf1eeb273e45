"""Calls of an HTTP frontend without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Buffer, Tensor, tensor_to_bytes
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead, ResponseWriter
from modelserver.protocol.response import HttpResponse

LENGTH = "inference-header-content-length"


@dataclass(frozen=True)
class HttpAnswer:
    """A complete answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        length = self.headers.get(LENGTH)
        return json.loads(self.body if length is None else self.body[: int(length)])

    @property
    def blobs(self) -> bytes:
        """What follows the JSON header."""
        return self.body[int(self.headers[LENGTH]) :]

    @property
    def error(self) -> str:
        document = self.json()
        assert list(document) == ["error"], f"not an error body: {document}"
        return str(document["error"])


class Exchange(HttpExchange):
    """An exchange that keeps its answer. It cannot be answered piece by piece."""

    def __init__(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: Buffer = b"") -> None:
        self.head = HttpHead(method, path, dict(headers or {}))
        self.body = body
        self.on_disconnect = None
        self.responses: list[HttpResponse] = []
        self._answered = asyncio.Event()

    def respond(self, response: HttpResponse) -> None:
        self.responses.append(response)
        self._answered.set()

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        raise AssertionError("a complete answer is expected here")

    def answer_now(self) -> HttpAnswer:
        """The one answer, which has been given."""
        assert len(self.responses) == 1, f"{len(self.responses)} answers"
        return read(self.responses[0])

    async def answer(self) -> HttpAnswer:
        """The one answer, once it is given."""
        await asyncio.wait_for(self._answered.wait(), 60)
        return self.answer_now()


def read(response: HttpResponse) -> HttpAnswer:
    headers = {name.lower(): value for name, value in response.headers}
    return HttpAnswer(response.status, headers, b"".join(response.body))


def ask_now(
    frontend: HttpHandler, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> HttpAnswer:
    """Call a handler that answers before it returns."""
    exchange = Exchange(method, path, headers, body)
    frontend.handle(exchange)
    return exchange.answer_now()


async def ask(
    frontend: HttpHandler, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> HttpAnswer:
    """Call a handler and wait for its answer."""
    exchange = Exchange(method, path, headers, body)
    frontend.handle(exchange)
    return await exchange.answer()


def binary_body(tensors: Sequence[Tensor], **fields: Any) -> tuple[bytes, dict[str, str]]:
    """An infer body with binary inputs and the header that goes with it; `fields` join the JSON part."""
    blobs = [bytes(tensor_to_bytes(tensor)) for tensor in tensors]
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype.value,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(blob)},
        }
        for tensor, blob in zip(tensors, blobs, strict=True)
    ]
    text = json.dumps({"inputs": inputs, **fields}).encode()
    return text + b"".join(blobs), {LENGTH: str(len(text))}


def json_body(name: str, datatype: str, shape: Sequence[int], data: Any, **fields: Any) -> bytes:
    """An infer body with one JSON input."""
    tensor = {"name": name, "datatype": datatype, "shape": list(shape), "data": data}
    return json.dumps({"inputs": [tensor], **fields}).encode()


def fp32(name: str, values: Any) -> Tensor:
    return Tensor(name, Datatype.FP32, np.array(values, np.float32))
