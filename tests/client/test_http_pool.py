"""Calls over HTTP/1.1 to servers that answer, delay, break off and refuse as the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from modelserver.client.address import Address
from modelserver.client.call_error import CallError
from modelserver.client.http_pool import MAX_LINE_BYTES, READ_AHEAD_BYTES, HttpPool
from modelserver.endpoints.endpoint import Outcome
from modelserver.errors import ErrorCode

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def saying(*answers: bytes) -> Serve:
    """Gives each request of a connection the next answer, and closes after the last."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        writer.close()

    return serve


def with_pool(serve: Serve, use: Callable[[HttpPool], Awaitable[None]]) -> None:
    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = HttpPool(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
        async with asyncio.timeout(20):
            await use(pool)
        pool.lose("the test is over")
        server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=5)

    asyncio.run(run())


def test_a_connection_is_kept_and_a_closed_one_replaced() -> None:
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await saying(OK, OK)(reader, writer)

    async def use(pool: HttpPool) -> None:
        for expected in (1, 1, 2):
            assert (await pool.ask("GET", "/", {}))[1] == b"hi"
            assert count == expected
            await asyncio.sleep(0.05)  # the server's close arrives

    with_pool(serve, use)


@pytest.mark.parametrize(
    ("status", "fields", "code", "outcome", "is_unprocessed", "retry_after_s"),
    [
        (400, b"", ErrorCode.INVALID_ARGUMENT, Outcome.CLIENT_ERROR, False, None),
        (401, b"", ErrorCode.INTERNAL, Outcome.CLIENT_ERROR, False, None),
        (404, b"", ErrorCode.NOT_FOUND, Outcome.CLIENT_ERROR, False, None),
        (429, b"Retry-After: 7\r\n", ErrorCode.OVERLOADED, Outcome.OVERLOADED, True, 7),
        (500, b"", ErrorCode.INTERNAL, Outcome.SERVER_ERROR, False, None),
        (503, b"", ErrorCode.UNAVAILABLE, Outcome.SERVER_ERROR, True, None),
        (503, b"Retry-After: 2\r\n", ErrorCode.UNAVAILABLE, Outcome.OVERLOADED, True, 2),
        (504, b"", ErrorCode.TIMED_OUT, Outcome.TIMED_OUT, False, None),
    ],
)
def test_an_error_answer_says_what_it_means(
    status: int, fields: bytes, code: ErrorCode, outcome: Outcome, is_unprocessed: bool, retry_after_s: float | None
) -> None:
    body = b'{"error": "the reason"}'
    answer = b"HTTP/1.1 %d No\r\n%sContent-Length: %d\r\n\r\n%s" % (status, fields, len(body), body)

    async def use(pool: HttpPool) -> None:
        with pytest.raises(CallError, match=f"HTTP {status}: the reason") as failed:
            await pool.ask("POST", "/", {}, [b"{}"])
        error = failed.value
        assert (error.code, error.outcome, error.is_unprocessed) == (code, outcome, is_unprocessed)
        assert error.retry_after_s == retry_after_s
        assert (await pool.ask("GET", "/", {}))[1] == b"hi", "the connection is kept"

    with_pool(saying(answer, OK), use)


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"garbage\r\n\r\n"],
)
def test_an_answer_that_breaks_off_is_lost(answer: bytes) -> None:
    async def use(pool: HttpPool) -> None:
        with pytest.raises(CallError) as failed:
            await pool.ask("GET", "/", {})
        assert failed.value.outcome is Outcome.LOST
        assert not failed.value.is_unprocessed

    with_pool(saying(answer), use)


def test_no_connection_means_that_nothing_was_processed() -> None:
    async def run() -> None:
        with pytest.raises(CallError, match="connection refused") as failed:
            await HttpPool(Address("127.0.0.1", 1)).ask("GET", "/", {})
        assert failed.value.is_unprocessed
        assert failed.value.outcome is Outcome.CONNECT_FAILED

    asyncio.run(run())


def test_a_server_is_read_no_faster_than_its_reader_reads() -> None:
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.transport.set_write_buffer_limits(high=65536)
        for _ in range(640):
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            written += 65536
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def use(pool: HttpPool) -> None:
        call = await pool.open("GET", "/", {})
        await call.wait_for_head()
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert written < 640 * 65536 / 2, "the kernel's buffers and what is read ahead"
        total = 0
        async for piece in call.pieces():
            total += len(piece)
        assert total == 640 * 65536
        assert total > READ_AHEAD_BYTES
        call.close()

    with_pool(serve, use)


def test_a_call_that_is_given_up_closes_its_connection() -> None:
    is_closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        assert await reader.read() == b""
        is_closed.set()
        writer.close()

    async def use(pool: HttpPool) -> None:
        call = await pool.open("GET", "/", {})
        await call.wait_for_head()
        call.close()
        await is_closed.wait()

    with_pool(serve, use)


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    async def run() -> None:
        server = await asyncio.start_unix_server(saying(OK), str(tmp_path / "socket"))
        pool = HttpPool(Address("", 0, unix_path=str(tmp_path / "socket")))
        assert (await pool.ask("GET", "/", {}))[1] == b"hi"
        pool.lose("the test is over")
        server.close()
        await asyncio.sleep(0.01)

    asyncio.run(run())


def test_lines_have_an_end() -> None:
    """However they are cut; a line without one does not fill the memory."""
    body = b"one\r\ntw" + b"o\n\n" + b"last"
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in (answer, body[:7], body[7:]):
            writer.write(piece)
            await asyncio.sleep(0.02)
        writer.close()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * MAX_LINE_BYTES >> 20):
                writer.write(bytes(1 << 20))
                await writer.drain()

    async def read(pool: HttpPool) -> list[bytes]:
        call = await pool.open("GET", "/", {})
        try:
            await call.wait_for_head()
            return [line async for line in call.lines()]
        finally:
            call.close()

    async def use(pool: HttpPool) -> None:
        assert await read(pool) == [b"one", b"two", b"", b"last"]

    async def use_endless(pool: HttpPool) -> None:
        with pytest.raises(CallError, match="a line of over"):
            await read(pool)

    with_pool(cut, use)
    with_pool(endless, use_endless)
