"""Recorded clients: their bytes, and handlers that answer whatever they ask from what they sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from modelserver.core.tensor import Buffer
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.call import Method, StreamCall, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.response import HttpResponse
from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.context import Outbox, WireContext
from modelserver.wire.limits import WireLimits

RECORDINGS = Path(__file__).resolve().parent.parent / "wire" / "recordings"


def recordings(protocol: str) -> list[str]:
    """Names of the recorded connections that speak `http1` or `http2`."""
    return sorted(path.stem for path in (RECORDINGS / protocol).glob("*.hex"))


@cache
def recording(protocol: str, name: str) -> bytes:
    """All that a client sent over one connection."""
    return bytes.fromhex((RECORDINGS / protocol / f"{name}.hex").read_text())


class ReplayHttp(HttpHandler):
    """Answers every request with what it was; `requests` are method, path, query and body of all."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, bytes]] = []

    def handle(self, exchange: HttpExchange) -> None:
        head = exchange.head
        self.requests.append((head.method, head.path, head.query, bytes(exchange.body)))
        seen = [head.method, head.path, head.query, dict(head.headers), _digest(exchange.body)]
        exchange.respond(HttpResponse(200, [("content-type", "application/json")], (json.dumps(seen).encode(),)))


class ReplayGrpc:
    """Answers every message of every method with what it was.

    Unary answers contain the message: a recorded client gives windows back for answers of at least its size.
    """

    def __init__(self) -> None:
        self.methods = dict(_methods())

    def drain(self) -> None:
        """There is nothing to drain."""


def _methods() -> Iterator[tuple[str, Method]]:
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            handler = Method(stream=_stream) if method.client_streaming else Method(unary=_unary)
            yield f"/{service.full_name}/{method.name}", handler
    yield "/test.Wire/Echo", Method(unary=_unary)
    yield "/test.Wire/Large", Method(unary=_large)
    yield "/test.Wire/Chat", Method(stream=_stream)


def _unary(call: UnaryCall) -> None:
    seen = json.dumps([_digest(call.message), sorted((key, str(value)) for key, value in call.metadata.items())])
    call.reply((seen.encode(), call.message))


def _large(call: UnaryCall) -> None:
    call.reply((bytes(50_000), bytes(50_000)))


async def _stream(call: StreamCall) -> None:
    async for message in call.messages:
        await call.send((_digest(message).encode(),))


def _digest(data: Buffer) -> str:
    return f"{len(data)} {hashlib.sha256(data).hexdigest()[:16]}"


def replay_context(limits: WireLimits | None = None, http: ReplayHttp | None = None) -> WireContext:
    """A port of its own, on the running loop."""
    loop = asyncio.get_running_loop()
    handlers = http or ReplayHttp(), ReplayGrpc()
    return WireContext(loop, *handlers, limits or WireLimits(), WireCounts(), Outbox(loop))
