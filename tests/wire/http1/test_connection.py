"""What our own HTTP/1.1 connection does beyond what both wires share: patience, order, offers, framing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from modelserver.frontends.http.exchange import HttpExchange, HttpResponse
from modelserver.wire.http1.server import Http1Server
from modelserver.wire.listener import HttpOptions

ADDRESS = "127.0.0.1"
Answer = Callable[[HttpExchange], None]


class Frontend:
    """Answers by a function; keeps every exchange."""

    def __init__(self, answer: Answer) -> None:
        self.exchanges: list[HttpExchange] = []
        self._arrived: asyncio.Queue[HttpExchange] = asyncio.Queue()
        self._answer = answer

    def handle(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)
        self._arrived.put_nowait(exchange)
        self._answer(exchange)

    async def next(self) -> HttpExchange:
        """The next exchange that came."""
        return await asyncio.wait_for(self._arrived.get(), 10)


def path_back(exchange: HttpExchange) -> None:
    exchange.respond(HttpResponse(200, [], (exchange.head.path.encode(),)))


def later(_exchange: HttpExchange) -> None:
    """The test answers."""


@asynccontextmanager
async def dialogue(
    answer: Answer = path_back, options: HttpOptions | None = None
) -> AsyncIterator[tuple[Frontend, asyncio.StreamReader, asyncio.StreamWriter]]:
    frontend = Frontend(answer)
    server = Http1Server(frontend, ADDRESS, 0, options)
    await server.start()
    reader, writer = await asyncio.open_connection(ADDRESS, server.port)
    try:
        yield frontend, reader, writer
    finally:
        writer.close()
        await server.stop(1)


async def _read(reader: asyncio.StreamReader, until: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(until), 10)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 10)


@pytest.mark.parametrize(
    "sent", [b"GET /a HTTP/1.1\r\nHost:", b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"]
)
async def test_a_request_that_does_not_go_on_is_ended(sent: bytes) -> None:
    async with dialogue(options=HttpOptions(receive_timeout_s=0.1)) as (frontend, reader, writer):
        writer.write(sent)
        assert (await _read_all(reader)).startswith(b"HTTP/1.1 408 ")
        assert not frontend.exchanges


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with dialogue(options=HttpOptions(keep_alive_s=0.1)) as (_, reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await _read_all(reader)).endswith(b"/a")


async def test_an_answer_may_take_longer_than_any_patience() -> None:
    options = HttpOptions(receive_timeout_s=0.1, keep_alive_s=0.1)
    async with dialogue(later, options) as (frontend, reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(1.3)  # the patience is looked at once a second
        frontend.exchanges[0].respond(HttpResponse(200, [], (b"at last",)))
        assert (await _read_all(reader)).endswith(b"at last")


async def test_answers_keep_the_order_of_the_requests() -> None:
    async with dialogue(later) as (frontend, reader, writer):
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(50)))
        for number in range(50):
            exchange = await frontend.next()
            assert len(frontend.exchanges) == number + 1  # the next one waits for this one's answer
            path_back(exchange)
            await _read(reader, b"/%d" % number)


async def test_http_1_0_is_kept_alive_only_when_it_asks() -> None:
    async with dialogue() as (_, reader, writer):
        writer.write(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"Connection: keep-alive" in await _read(reader, b"/a")
        writer.write(b"GET /b HTTP/1.0\r\n\r\n")
        assert b"Connection: close" in await _read_all(reader)


async def test_an_offer_to_upgrade_is_passed_over() -> None:
    async with dialogue() as (_, reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert (await _read(reader, b"/a")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await _read(reader, b"/b")).startswith(b"HTTP/1.1 200 ")


async def test_an_invitation_waits_for_the_answers_before_it() -> None:
    async with dialogue(later) as (frontend, reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.write(b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        path_back(await frontend.next())
        assert (await _read(reader, b"/a")).startswith(b"HTTP/1.1 200 ")
        assert await _read(reader, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await frontend.next()).body == b"abc"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked, chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n",
    ],
)
async def test_requests_that_two_readers_could_read_differently_are_refused(head: bytes) -> None:
    async with dialogue() as (frontend, reader, writer):
        writer.write(head + b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await _read_all(reader)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "/smuggled" not in [exchange.head.path for exchange in frontend.exchanges]


async def test_a_target_in_absolute_form_loses_its_host() -> None:
    async with dialogue() as (frontend, reader, writer):
        writer.write(b"GET http://elsewhere/a%2Fb?c=d HTTP/1.1\r\nHost: elsewhere\r\n\r\n")
        assert (await _read(reader, b"/a/b")).startswith(b"HTTP/1.1 200 ")
    assert frontend.exchanges[0].head.query == "c=d"


async def test_who_does_not_read_holds_up_only_itself() -> None:
    large = bytes(4 << 20)
    async with dialogue(lambda exchange: exchange.respond(HttpResponse(200, [], (large,)))) as (frontend, _, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        await asyncio.sleep(0.2)
        # Its further requests are neither executed nor their answers piled up.
        assert len(frontend.exchanges) < 10
