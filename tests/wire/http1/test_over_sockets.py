"""What only a socket and a real transport show: back-pressure, closes that must not overtake answers, both loops."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from support.certificates import Authority
from support.gate import until
from support.http1_dialogue import Answer, DialogueHandler, limits_of, path_back
from support.loops import on_both_loops

from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import HttpResponse
from modelserver.wire.address import Address
from modelserver.wire.limits import WireLimits
from modelserver.wire.native_server import NativeServer
from modelserver.wire.tls import TlsFiles

MIB = 1 << 20
GET = b"GET /%d HTTP/1.1\r\nHost: test\r\n\r\n"


@asynccontextmanager
async def _dialogue(
    answer: Answer = path_back, limits: WireLimits | None = None, authority: Authority | None = None
) -> AsyncIterator[tuple[DialogueHandler, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A port, over TLS where there is an `authority`, and a client."""
    frontend = DialogueHandler(answer)
    tls = client_tls = None
    if authority is not None:
        pair = authority.pair("server")
        tls = TlsFiles(str(pair.certificate), str(pair.key))
        client_tls = authority.client_context(("http/1.1",))
    server = NativeServer(Address("127.0.0.1", 0), http=frontend, limits=limits, tls=tls)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=client_tls)
    try:
        yield frontend, reader, writer
    finally:
        writer.close()
        await server.stop(1)


def _digest_back(exchange: HttpExchange) -> None:
    exchange.respond(HttpResponse(200, [], (hashlib.sha256(exchange.body).digest(),)))


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return await asyncio.wait_for(reader.readexactly(length), 60)


@on_both_loops
async def test_bodies_arrive_as_they_were_sent() -> None:
    random = np.random.default_rng(1)
    async with _dialogue(_digest_back) as (_, reader, writer):
        for size in (0, 1, 32 * 1024, 320 * 1024, 8 * MIB, 100):
            body = random.bytes(size)
            writer.write(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % size + body)
            assert await _read_body(reader) == hashlib.sha256(body).digest()


@on_both_loops
async def test_pipelined_bodies_arrive_as_they_were_sent() -> None:
    random = np.random.default_rng(2)
    bodies = [random.bytes(size) for size in random.integers(0, 200_000, 50)]
    async with _dialogue(_digest_back) as (_, reader, writer):
        for body in bodies:
            writer.write(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        for body in bodies:
            assert await _read_body(reader) == hashlib.sha256(body).digest()


@on_both_loops
async def test_bodies_over_tls(tmp_path: Path) -> None:
    body = np.random.default_rng(3).bytes(4 * MIB)
    request = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def echo(exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, [], (exchange.body,)))

    async with _dialogue(echo, authority=Authority(tmp_path)) as (_, reader, writer):
        writer.write(request)
        assert await _read_body(reader) == body
        writer.write(GET % 1 + b"nonsense\r\n\r\n")
        assert await _read_body(reader) == b""
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 400 ")


@on_both_loops
async def test_thousands_of_pipelined_requests() -> None:
    async with _dialogue() as (_, reader, writer):
        writer.write(b"".join(GET % number for number in range(3000)))
        for number in range(3000):
            assert await _read_body(reader) == b"/%d" % number


@on_both_loops
async def test_who_does_not_read_holds_up_only_itself() -> None:
    large = bytes(4 * MIB)
    async with _dialogue(lambda exchange: exchange.respond(HttpResponse(200, [], (large,)))) as (
        frontend,
        reader,
        writer,
    ):
        writer.write(GET % 1 * 100)
        await until(lambda: bool(frontend.exchanges), "the first one came")
        await asyncio.sleep(0.2)
        # Its further requests are neither executed nor their answers piled up.
        assert 0 < len(frontend.exchanges) < 10
        for _ in range(100):
            assert await _read_body(reader) == large


@on_both_loops
async def test_a_writer_of_pieces_waits_for_its_reader() -> None:
    written = 0
    tasks = []

    async def stream(exchange: HttpExchange) -> None:
        nonlocal written
        writer = exchange.start(200, [])
        for _ in range(1000):
            await writer.write(bytes(100_000))
            written += 1
        await writer.close()

    def start(exchange: HttpExchange) -> None:
        tasks.append(asyncio.ensure_future(stream(exchange)))

    async with _dialogue(start) as (_, reader, writer):
        writer.write(GET % 1)
        await until(lambda: written > 0, "it has begun")
        await asyncio.sleep(0.2)
        assert written < 300
        received, end = 0, b""
        while end != b"\r\n0\r\n\r\n":
            piece = await asyncio.wait_for(reader.read(MIB), 60)
            assert piece, "it closed before the end"
            received += len(piece)
            end = (end + piece)[-7:]
        assert received > 100_000_000
        await asyncio.wait_for(tasks[0], 60)


@on_both_loops
async def test_a_client_that_sends_all_before_it_reads_learns_why_it_was_refused() -> None:
    async with _dialogue(limits=limits_of(max_body_bytes=4 * MIB)) as (frontend, reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % (5 * MIB))
        for _ in range(4):
            writer.write(bytes(MIB))
            await writer.drain()
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 413 ")
        assert not frontend.exchanges


@on_both_loops
@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("behind", [b"\r\n", bytes(200_000)], ids=["line", "much"])
async def test_the_last_answer_is_whole_whatever_comes_behind_its_request(
    tmp_path: Path, is_secured: bool, behind: bytes
) -> None:
    authority = Authority(tmp_path) if is_secured else None

    def answer(exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, [], (bytes(3 * MIB),)))

    def ask(port: int) -> bytes:
        """With a socket that blocks: uvloop's own TLS gives its reader less than came, where the end is behind it."""
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            if authority is not None:
                trust = authority.client_context(("http/1.1",))
                client = stack.enter_context(trust.wrap_socket(client, server_hostname="127.0.0.1"))
            client.sendall(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n" + behind)
            time.sleep(0.01)
            return b"".join(iter(lambda: client.recv(MIB), b"")).partition(b"\r\n\r\n")[2]

    async with _dialogue(answer, authority=authority) as (_, _, writer):
        _, port, *_ = writer.get_extra_info("peername")
        for _ in range(5):
            assert await asyncio.to_thread(ask, port) == bytes(3 * MIB)


@on_both_loops
async def test_an_answer_reaches_a_client_that_goes_on_sending_nonsense() -> None:
    async with _dialogue() as (_, reader, writer):
        writer.write(GET % 1 + b"nonsense" * 5000)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 400 " in answer


@on_both_loops
async def test_a_client_that_leaves_is_noticed() -> None:
    left = asyncio.Event()

    def hold(exchange: HttpExchange) -> None:
        exchange.on_disconnect = left.set

    async with _dialogue(hold) as (_, _reader, writer):
        writer.write(GET % 1)
        await writer.drain()
        writer.close()
        await asyncio.wait_for(left.wait(), 60)
