"""How a connection finds its protocol, over real sockets, on both event loops; connections say what they got."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from support.certificates import Authority
from support.loops import on_both_loops

from modelserver.telemetry.wire_counts import Protocol, Violation, WireCounts
from modelserver.wire.acceptor import Acceptor
from modelserver.wire.address import Address
from modelserver.wire.context import WireContext
from modelserver.wire.limits import TimeLimits, WireLimits
from modelserver.wire.port import Port
from modelserver.wire.protocol_detector import PREFACE
from modelserver.wire.tls import TlsFiles

HOST = "127.0.0.1"


class Told(asyncio.BufferedProtocol):
    """A connection that says its protocol, and then gives back what it gets."""

    def __init__(self, context: WireContext, name: bytes) -> None:
        self._context = context
        self._name = name
        self._buffer = memoryview(bytearray(65536))  # asyncio's TLS slices it, and a bytearray would be copied
        self.transport: asyncio.Transport

    def begin(self, transport: asyncio.Transport, data: bytes) -> None:
        self.transport = transport
        self._context.connections.add(self)
        transport.write(self._name + b":" + data)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.write(bytes(self._buffer[:nbytes]))

    def connection_lost(self, _error: Exception | None) -> None:
        self._context.connections.discard(self)

    def sweep(self, now_s: float) -> None:
        """Nothing takes time here."""

    def shutdown(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()


class Door:
    """A listening port, and what is behind it."""

    def __init__(self, port: Port, number: int) -> None:
        self.port = port
        self.number = number
        self.context = port.context

    @property
    def violations(self) -> dict[Violation, int]:
        return {violation: count for (_, violation), count in self.context.counts.violations.items()}

    @property
    def num_handshakes(self) -> int:
        return len(self.port._shaking)

    @property
    def num_unknown(self) -> int:
        return self.context.counts.connections_open[Protocol.UNKNOWN]


@asynccontextmanager
async def door(
    limits: WireLimits | None = None, tls: TlsFiles | None = None, *, early: Callable[[int], None] | None = None
) -> AsyncIterator[Door]:
    """`early` is called with the port's number when connections come that are not accepted yet."""
    port = Port(
        "the port",
        http=None,
        grpc=None,
        limits=limits or WireLimits(),
        counts=WireCounts(),
        tls=tls,
        http1=lambda context: Told(context, b"one"),
        http2=lambda context: Told(context, b"two"),
    )
    bound = Address(HOST, 0).bind()
    acceptor = Acceptor(asyncio.get_running_loop(), bound, port.take)
    acceptor.start()
    if early is not None:
        early(bound.getsockname()[1])
    try:
        yield Door(port, bound.getsockname()[1])
    finally:
        acceptor.close()
        await port.stop(0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for happens at the other end
            await asyncio.sleep(0.002)


async def ask(port: int, *pieces: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """What comes back for these pieces, sent apart, as long as the connection of the server is one of ours."""
    reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        size = len(b"one:") + sum(map(len, pieces))
        return await asyncio.wait_for(reader.readexactly(size), 60)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("pieces", "name"),
    [
        ((PREFACE,), b"two"),
        ((PREFACE + b"more",), b"two"),
        ((b"P", b"RI", b" * HTTP/2.0\r\n\r\n", b"SM\r\n\r\nmore"), b"two"),
        ((b"GET / HTTP/1.1\r\n",), b"one"),
        ((b"G", b"ET"), b"one"),
        ((b"P", b"OST / HTTP/1.1\r\n"), b"one"),
        ((b"PRISM / HTTP/1.1\r\n",), b"one"),
        ((b"\r\n",), b"one"),
        ((b"\x00",), b"one"),
    ],
)
@on_both_loops
async def test_the_first_bytes_tell_the_protocol(pieces: tuple[bytes, ...], name: bytes) -> None:
    async with door() as opened:
        assert await ask(opened.number, *pieces) == name + b":" + b"".join(pieces)
        assert opened.context.counts.connections_opened[Protocol.UNKNOWN] == 1
        await until(lambda: not opened.num_unknown)
        assert not opened.violations


@pytest.mark.parametrize(
    ("sent", "name"), [(PREFACE + b"more", b"two"), (b"GET / HTTP/1.1\r\n", b"one"), (b"\r\n", b"one")]
)
@on_both_loops
async def test_what_came_before_the_connection_was_accepted(sent: bytes, name: bytes) -> None:
    with socket.socket() as client:

        def begin(number: int) -> None:
            client.connect((HOST, number))
            client.sendall(sent)

        async with door(early=begin) as opened:
            client.setblocking(False)
            received, size = b"", len(name + b":" + sent)
            async with asyncio.timeout(60):
                while len(received) < size:
                    received += await asyncio.get_running_loop().sock_recv(client, size)
            assert received == name + b":" + sent
            assert (opened.num_handshakes, opened.num_unknown) == (0, 0)
            assert not opened.violations


@on_both_loops
async def test_a_connection_that_was_reset_before_it_was_accepted(caplog: pytest.LogCaptureFixture) -> None:
    def reset(number: int) -> None:
        with socket.create_connection((HOST, number)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with door(early=reset) as opened:
        assert await ask(opened.number, b"GET") == b"one:GET"
        await until(lambda: not opened.context.connections)
        assert (opened.num_handshakes, opened.num_unknown) == (0, 0)
    assert not caplog.records


async def _closed_after(port: int, *pieces: bytes) -> None:
    """The connection is closed without an answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


@pytest.mark.parametrize("pieces", [(b"PRI * HTTP/2.1\r\n\r\nSM\r\n\r\n",), (b"PRI ", b"/ HTTP/1.1\r\n")])
@on_both_loops
async def test_a_preface_that_goes_wrong_is_cut(pieces: tuple[bytes, ...]) -> None:
    async with door() as opened:
        await _closed_after(opened.number, *pieces)
        assert opened.violations == {Violation.BAD_PREFACE: 1}


@on_both_loops
async def test_tls_on_a_plain_port_is_cut_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with door() as opened:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                with pytest.raises(OSError):  # noqa: PT011 - its kind is the loop's affair
                    await ask(opened.number, tls=ssl.create_default_context())
        assert opened.violations == {Violation.TLS: 3}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("the port: a client tries TLS on a port without it; give the server a certificate")


@pytest.mark.parametrize("pieces", [(), (b"PRI * HT",), (b"P",)])
@on_both_loops
async def test_who_says_nothing_complete_is_cut_when_its_time_is_over(pieces: tuple[bytes, ...]) -> None:
    async with door(WireLimits(times=TimeLimits(head_s=0.05))) as opened:
        asked = asyncio.ensure_future(_closed_after(opened.number, *pieces))
        await until(lambda: opened.num_unknown == 1)
        now_s = opened.context.loop.time()
        for connection in list(opened.context.connections):
            connection.sweep(now_s + 0.01)
        assert opened.num_unknown == 1
        for connection in list(opened.context.connections):
            connection.sweep(now_s + 0.1)
        await asked
        assert opened.violations == {Violation.SLOW_HEAD: 1}
        assert not opened.num_unknown


@on_both_loops
async def test_a_client_that_leaves_at_once_is_no_violation() -> None:
    async with door() as opened:
        _, writer = await asyncio.open_connection(HOST, opened.number)
        await until(lambda: opened.num_unknown == 1)
        writer.close()
        await until(lambda: not opened.context.connections)
        assert not opened.violations


@on_both_loops
async def test_shutdown_closes_what_has_asked_nothing() -> None:
    async with door() as opened:
        _, writer = await asyncio.open_connection(HOST, opened.number)
        await until(lambda: opened.num_unknown == 1)
        for connection in list(opened.context.connections):
            connection.shutdown()
        await until(lambda: not opened.context.connections)
        writer.close()


@on_both_loops
async def test_answers_leave_at_once() -> None:
    async with door() as opened:
        assert await ask(opened.number, b"x") == b"one:x"
        reader, writer = await asyncio.open_connection(HOST, opened.number)
        writer.write(b"x")
        await reader.readexactly(5)
        (connection,) = cast("set[Told]", opened.context.connections)
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


# Room.


@on_both_loops
async def test_who_is_one_too_many_is_told_in_http() -> None:
    async with door(WireLimits(max_connections=1)) as opened:
        _, first = await asyncio.open_connection(HOST, opened.number)
        await until(lambda: opened.num_unknown == 1)
        reader, writer = await asyncio.open_connection(HOST, opened.number)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"raise the limit with --max-connections" in answer
        writer.close()
        first.close()
        await until(lambda: not opened.context.connections)
        assert opened.violations == {Violation.TOO_MANY_CONNECTIONS: 1}
        assert await ask(opened.number, b"x") == b"one:x", "there is room again"


@on_both_loops
async def test_who_is_one_too_many_is_cut_in_http2_so_that_it_backs_off() -> None:
    async with door(WireLimits(max_connections=0)) as opened:
        await _closed_after(opened.number, PREFACE)
        assert opened.violations == {Violation.TOO_MANY_CONNECTIONS: 1}


@on_both_loops
async def test_many_that_come_at_once_are_counted_once() -> None:
    async with door(WireLimits(max_connections=100)) as opened:
        clients = await asyncio.gather(*(asyncio.open_connection(HOST, opened.number) for _ in range(100)))
        await until(lambda: opened.num_unknown == 100)
        assert not opened.violations
        for _, writer in clients:
            writer.close()


@on_both_loops
async def test_refused_connections_that_say_nothing_are_cut() -> None:
    async with door(WireLimits(max_connections=0)) as opened:
        reader, writer = await asyncio.open_connection(HOST, opened.number)
        await until(lambda: opened.context.connections)
        for connection in list(opened.context.connections):
            connection.sweep(opened.context.loop.time() + 2)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


@on_both_loops
async def test_a_flood_beyond_the_limit_holds_a_bounded_number_of_connections() -> None:
    async with door(WireLimits(max_connections=0)) as opened:
        clients = [await asyncio.open_connection(HOST, opened.number) for _ in range(80)]
        await until(lambda: opened.violations == {Violation.TOO_MANY_CONNECTIONS: 80})
        assert len(opened.context.connections) == 64
        for _, writer in clients:
            writer.close()


@on_both_loops
async def test_descriptors_are_kept_for_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door() as opened:
        assert await ask(opened.number, b"x") == b"one:x"
        monkeypatch.setattr("resource.getrlimit", lambda _which: (7, 7))
        reader, writer = await asyncio.open_connection(HOST, opened.number)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert b"nearly all of the server's 7 file descriptors are open; raise them with ulimit -n" in answer
        writer.close()


# TLS.


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls(authority: Authority) -> TlsFiles:
    pair = authority.pair("server")
    return TlsFiles(str(pair.certificate), str(pair.key))


@pytest.mark.parametrize(
    ("alpn", "data", "name"),
    [
        (("h2",), b"PRI whatever", b"two"),
        (("h2", "http/1.1"), b"x", b"two"),
        (("http/1.1",), b"GET /", b"one"),
        ((), PREFACE, b"two"),
        ((), b"GET /", b"one"),
        (("spdy",), b"GET /", b"one"),
    ],
)
@on_both_loops
async def test_the_handshake_tells_the_protocol(
    authority: Authority, tls: TlsFiles, alpn: tuple[str, ...], data: bytes, name: bytes
) -> None:
    async with door(tls=tls) as opened:
        answer = await ask(opened.number, data, tls=authority.client_context(alpn))
        assert answer.replace(b":", b"") == name + data
        await until(lambda: not opened.num_unknown)
        assert not opened.violations


@on_both_loops
async def test_connections_with_tls_carry_what_they_must(authority: Authority, tls: TlsFiles) -> None:
    data = bytes(range(256)) * 8192
    async with door(tls=tls) as opened:
        reader, writer = await asyncio.open_connection(
            HOST, opened.number, ssl=authority.client_context(("h2",)), limit=1 << 22
        )
        assert await reader.readexactly(4) == b"two:"
        writer.write(data)
        assert await asyncio.wait_for(reader.readexactly(len(data)), 60) == data
        writer.close()
        await writer.wait_closed()
        await until(lambda: not opened.context.connections)


@on_both_loops
async def test_a_handshake_that_fails_is_counted_and_said(tls: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    async with door(tls=tls) as opened:
        with caplog.at_level(logging.WARNING, "modelserver"):
            await _closed_after_tls(opened.number, b"\0" * 50)
            await until(lambda: opened.violations == {Violation.TLS: 1})
    assert "a TLS handshake failed" in caplog.text


async def _closed_after_tls(port: int, data: bytes) -> None:
    """The connection is closed, perhaps with an alert."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer == b"" or answer[0] == 0x15, "nothing, or an alert"
    writer.close()


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00"])
@on_both_loops
async def test_a_handshake_that_goes_on_for_ever_is_cut(tls: TlsFiles, data: bytes) -> None:
    async with door(WireLimits(times=TimeLimits(head_s=0.05)), tls) as opened:
        await _closed_after_tls(opened.number, data)
        await until(lambda: not opened.context.connections)
        assert sum(opened.violations.values()) == 1


@on_both_loops
async def test_a_client_that_leaves_within_the_handshake_is_no_violation(tls: TlsFiles) -> None:
    async with door(tls=tls) as opened:
        _, writer = await asyncio.open_connection(HOST, opened.number)
        await until(lambda: opened.num_handshakes == 1)
        writer.close()
        await until(lambda: not opened.num_handshakes)
        assert not opened.violations


@on_both_loops
async def test_stopping_ends_handshakes(tls: TlsFiles) -> None:
    async with door(tls=tls) as opened:
        _, writer = await asyncio.open_connection(HOST, opened.number)
        await until(lambda: opened.num_handshakes == 1)
        await opened.port.stop(0)
        assert not opened.num_handshakes
        writer.close()


@on_both_loops
async def test_stopping_in_the_moment_of_an_accept_leaves_no_socket(tls: TlsFiles) -> None:
    async with door(tls=tls) as opened:
        with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            opened.port.take(accepted)
            await opened.port.stop(0)
        assert not opened.num_handshakes


@on_both_loops
async def test_who_is_one_too_many_is_cut_before_the_handshake(authority: Authority, tls: TlsFiles) -> None:
    async with door(WireLimits(max_connections=0), tls) as opened:
        with pytest.raises(OSError):  # noqa: PT011 - its kind is the loop's affair
            await ask(opened.number, tls=authority.client_context())
        assert opened.violations == {Violation.TOO_MANY_CONNECTIONS: 1}
