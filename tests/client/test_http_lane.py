"""A lane against a server that answers as a test writes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from modelserver.client.address import Address
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Lane
from modelserver.errors import UnavailableError

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"


class Told:
    """Waits for answers."""

    def __init__(self) -> None:
        self._failures: asyncio.Queue[str | None] = asyncio.Queue()

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        assert lane.start_ns <= lane.sent_ns <= now_ns
        self._failures.put_nowait(failure)

    def responded(self, lane: Lane) -> None:
        raise AssertionError("HTTP has one response")

    async def next(self) -> str | None:
        async with asyncio.timeout(60):
            return await self._failures.get()


@asynccontextmanager
async def scripted(*answers: bytes | None, pieces: int | None = None) -> AsyncIterator[tuple[HttpLane, Told]]:
    """A connected lane to a server that gives these answers in turn; None closes the connection."""
    left = list(answers)
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                answer = left.pop(0)
                if answer is None:
                    break
                for at in range(0, len(answer), pieces or len(answer)):
                    writer.write(answer[at : at + (pieces or len(answer))])
                    await writer.drain()
                    if pieces:
                        await asyncio.sleep(0.001)
                if b"Connection: close" in answer or (b"Content-Length" not in answer and b"chunked" not in answer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    told = Told()
    lane = HttpLane(Address("127.0.0.1", server.sockets[0].getsockname()[1]), told)
    await lane.connect()
    try:
        yield lane, told
    finally:
        lane.close()
        server.close()
        await asyncio.gather(*tasks)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("pieces", [None, 1, 3, 40])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    ],
    ids=["length", "chunked", "to the end", "continue"],
)
async def test_answers_come_whole(answer: bytes, keeps: bool, pieces: int | None) -> None:
    async with scripted(answer, answer, pieces=pieces) as (lane, told):
        for _ in range(2):
            lane.keeps_answer = keeps
            lane.send(REQUEST)
            assert await told.next() is None
            if keeps:
                assert lane.answer == b"hello"


async def test_an_error_is_told_with_its_words() -> None:
    answer = b'HTTP/1.1 400 Bad\r\nContent-Length: 16\r\n\r\n{"error": "why"}'
    async with scripted(answer, OK) as (lane, told):
        lane.send(REQUEST)
        assert await told.next() == "HTTP 400: why"
        lane.send(REQUEST)
        assert await told.next() is None


async def test_a_connection_that_the_server_closes_is_opened_again() -> None:
    last = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with scripted(last, OK, None, OK) as (lane, told):
        for expected in (None, None, "the server closed the connection without an answer", None):
            lane.send(REQUEST)
            assert await told.next() == expected


async def test_bytes_behind_an_answer_are_a_failure() -> None:
    async with scripted(OK + b"more", OK) as (lane, told):
        lane.send(REQUEST)
        assert await told.next() == "the answer cannot be read: 4 bytes follow the 5 that Content-Length announced"
        lane.send(REQUEST)
        assert await told.next() is None


async def test_a_server_that_is_gone_is_told_for_every_request() -> None:
    async with scripted(None) as (lane, told):
        lane.send(REQUEST)
        assert await told.next() == "the server closed the connection without an answer"
    # Closed by now: the next one cannot connect.
    other = HttpLane(lane._address, told)
    other.send(REQUEST)
    failure = await told.next()
    assert failure is not None
    assert "connection refused" in failure


async def test_connecting_to_nobody_says_what_to_do() -> None:
    lane = HttpLane(Address("127.0.0.1", 1), Told())
    with pytest.raises(UnavailableError, match="say where it is with --url"):
        await lane.connect()
