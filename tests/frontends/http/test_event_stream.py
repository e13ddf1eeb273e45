from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from support.batching import request as make_request
from support.grpc_calls import turns
from support.http_calls import Exchange

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError, UnavailableError
from modelserver.frontends.http.event_stream import EventStream
from modelserver.protocol.exchange import ResponseWriter
from modelserver.protocol.response import HttpResponse


class Writer:
    """Takes what is written while it has room, until its client leaves."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.has_left = False
        self.has_room = asyncio.Event()
        self.has_room.set()

    async def write(self, data: Buffer) -> None:
        if self.has_left:
            raise ConnectionResetError("the client has left")
        self.written += bytes(data)
        await self.has_room.wait()

    async def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True

    def events(self) -> list[Any]:
        parts = self.written.split(b"\n\n")
        assert parts.pop() == b"", "an event is not complete"
        assert all(part.startswith(b"data: ") for part in parts)
        return [json.loads(part[6:]) for part in parts]


class StreamedExchange(Exchange):
    def __init__(self) -> None:
        super().__init__("POST", "/v2/models/m/generate_stream")
        self.writer = Writer()
        self.started: list[tuple[int, dict[str, str]]] = []

    def respond(self, response: HttpResponse) -> None:
        raise AssertionError("a stream is expected here")

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        self.started.append((status, dict(headers)))
        return self.writer


def encode(_: InFlightRequest, response: InferResponse) -> bytes:
    if (response.parameters or {}).get("is_bad"):
        raise InvalidArgumentError("it has no JSON form")
    return json.dumps(dict(response.parameters or {})).encode()


def say(**parameters: int) -> InferResponse:
    return InferResponse(parameters=parameters, is_final=False)


@pytest.fixture
def exchange() -> StreamedExchange:
    return StreamedExchange()


@pytest.fixture
def stream(exchange: StreamedExchange) -> EventStream:
    made = EventStream(exchange, encode)
    made.request = make_request(stream=made)
    return made


async def test_an_event_for_each_response(exchange: StreamedExchange, stream: EventStream) -> None:
    stream.deliver(say(a=1))
    await turns()
    [(status, headers)] = exchange.started
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["Cache-Control"] == "no-cache"
    stream.deliver(say(a=2))
    stream.deliver(say(a=3))
    await turns()
    assert not exchange.writer.is_closed
    stream.deliver(InferResponse())
    await turns()
    assert exchange.writer.is_closed
    assert exchange.writer.events() == [{"a": 1}, {"a": 2}, {"a": 3}]


async def test_a_stream_without_responses(exchange: StreamedExchange, stream: EventStream) -> None:
    stream.deliver(InferResponse())
    await turns()
    assert [status for status, _ in exchange.started] == [200]
    assert (exchange.writer.written, exchange.writer.is_closed) == (b"", True)


async def test_the_first_response_decides_the_status(exchange: StreamedExchange, stream: EventStream) -> None:
    stream.deliver(InferResponse(error=UnavailableError("busy \udcff"), is_final=False))
    stream.deliver(InferResponse(error=InvalidArgumentError("wrong")))
    await turns()
    assert [status for status, _ in exchange.started] == [503]
    assert exchange.writer.events() == [{"error": "busy ?"}, {"error": "wrong"}]


async def test_a_response_without_json_form_is_an_error_event(exchange: StreamedExchange, stream: EventStream) -> None:
    stream.deliver(say(is_bad=1))
    stream.deliver(say(a=1))
    stream.deliver(InferResponse())
    await turns()
    assert exchange.writer.events() == [{"error": "it has no JSON form"}, {"a": 1}]


async def test_the_reader_tells_what_it_has_read(exchange: StreamedExchange, stream: EventStream) -> None:
    told: list[int] = []
    stream.on_read = lambda: told.append(1)
    exchange.writer.has_room.clear()
    stream.deliver(say(a=1))
    await turns()
    stream.deliver(say(a=2))
    stream.deliver(say(a=3))
    await turns()
    assert (len(told), len(exchange.writer.events())) == (0, 1)
    exchange.writer.has_room.set()
    await turns()
    assert (len(told), len(exchange.writer.events())) == (3, 3)


@pytest.mark.parametrize("begins", [False, True])
async def test_a_client_that_left_cancels(exchange: StreamedExchange, stream: EventStream, begins: bool) -> None:
    told: list[int] = []
    stream.on_read = lambda: told.append(1)
    request = stream.request
    if begins:
        stream.deliver(say(a=1))
        await turns()
    exchange.writer.has_left = True
    stream.deliver(say(a=2))
    await turns()
    assert request.is_cancelled
    before = len(told)
    stream.deliver(say(a=3))
    stream.deliver(InferResponse())
    await turns()
    assert len(told) == before + 2
    assert not exchange.writer.is_closed


async def test_what_fails_here_ends_the_stream_and_is_logged(
    exchange: StreamedExchange, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: InFlightRequest, response: InferResponse) -> bytes:
        raise RuntimeError(f"{request.id}{response.is_final}")

    stream = EventStream(exchange, fail)
    stream.request = request = make_request(stream=stream)
    stream.deliver(say(a=1))
    await turns()
    assert request.is_cancelled
    assert "a stream of events failed" in caplog.text


async def test_nothing_stays_in_memory(exchange: StreamedExchange) -> None:
    stream = EventStream(exchange, encode)
    stream.request = make_request(stream=stream)
    kept = weakref.ref(stream.request.inputs["IN"].data)
    gc.disable()
    try:
        stream.deliver(say(a=1))
        stream.deliver(InferResponse())
        await turns()
        assert exchange.writer.is_closed
        del stream
        assert kept() is None
    finally:
        gc.enable()
