"""Whole connections over sockets: other libraries' clients, both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc.aio
import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx
from support.http2_frames import PREFACE, settings
from support.loops import on_both_loops
from support.memory_http2 import until
from support.wire_frontends import GrpcExamples, HttpExamples

from modelserver.telemetry.wire_counts import Protocol, WireCounts
from modelserver.wire.context import Outbox, WireContext
from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.limits import KeepaliveLimits, WireLimits

MIB = 1 << 20


class Accepted(Http2Connection):
    """A connection that takes every socket for HTTP/2."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.begin(transport, b"")  # type: ignore[arg-type]


class Port:
    """A listening port with test handlers."""

    def __init__(self, limits: WireLimits | None) -> None:
        loop = asyncio.get_running_loop()
        self.grpc, self.http = GrpcExamples(), HttpExamples()
        self.context = WireContext(loop, self.http, self.grpc, limits or WireLimits(), WireCounts(), Outbox(loop))
        self.number = 0

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.number}"


@contextlib.asynccontextmanager
async def listening(limits: WireLimits | None = None) -> AsyncIterator[Port]:
    port = Port(limits)
    server = await port.context.loop.create_server(lambda: Accepted(port.context), "127.0.0.1", 0)
    port.number = server.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        server.close()
        for connection in list(port.context.connections):
            connection.abort()
        await until(lambda: not port.context.connections)
        assert port.context.counts.connections_open[Protocol.HTTP2] == 0
        assert port.context.counts.open_streams == 0
        assert port.context.assembly.num_bytes == 0


@contextlib.asynccontextmanager
async def channel(port: Port) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(port.url, options=options) as opened:
        yield opened


@on_both_loops
async def test_grpcio_calls_of_all_sizes() -> None:
    async with listening() as port, channel(port) as client:
        echo = client.unary_unary("/test.Wire/Echo")
        for size in (0, 1, 16_378, 16_379, 65_530, MIB, 9 * MIB):
            message = bytes(range(251)) * (size // 251) + bytes(size % 251)
            assert await echo(message) == message


@on_both_loops
async def test_many_grpcio_calls_at_once() -> None:
    async with listening() as port, channel(port) as client:
        echo = client.unary_unary("/test.Wire/Echo")
        answers = await asyncio.gather(*[echo(b"%d" % index, timeout=20) for index in range(500)])
        assert answers == [b"%d" % index for index in range(500)]


@on_both_loops
async def test_a_thousand_streamed_messages_each_way() -> None:
    async with listening() as port, channel(port) as client:
        chat = client.stream_stream("/test.Wire/Chat")
        sent = [b"%d" % index * (index % 300) for index in range(1000)]
        assert [message async for message in chat(iter(sent))] == sent


@on_both_loops
async def test_a_cancelled_grpcio_call() -> None:
    async with listening() as port, channel(port) as client:
        call = client.unary_unary("/test.Wire/Hold")(b"x")
        await until(lambda: bool(port.grpc.held))
        call.cancel()
        await until(lambda: port.grpc.num_cancelled == 1)


@on_both_loops
async def test_connections_age_without_losing_calls() -> None:
    """Clients learn of the end in two steps, and go on with another connection."""
    limits = WireLimits(keepalive=KeepaliveLimits(max_age_s=0.05))
    async with listening(limits) as port, channel(port) as client:
        echo = client.unary_unary("/test.Wire/Echo")
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 1.0
        while loop.time() < until_s:
            assert len(await asyncio.gather(*[echo(b"x", timeout=20) for _ in range(20)])) == 20
            for connection in list(port.context.connections):
                connection.sweep(loop.time())
        assert port.context.counts.connections_opened[Protocol.HTTP2] >= 4


@on_both_loops
async def test_httpx_over_http2() -> None:
    async with listening() as port, httpx.AsyncClient(http1=False, http2=True, base_url=f"http://{port.url}") as client:
        assert (await client.get("/")).text == "hello"
        body = bytes(range(256)) * 8192
        assert (await client.post("/echo", content=body)).content == body
        assert (await client.get("/pieces/100/1000")).content == bytes(100_000)
        assert (await client.get("/nothing")).status_code == 404


class H2Client:
    """The `h2` library with a socket: strict about what a server sends."""

    def __init__(self, port: Port) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port.number))
        self.socket.setblocking(False)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.events: list[h2.events.Event] = []

    async def talk(self, until: type[h2.events.Event]) -> h2.events.Event:
        """Exchange what there is until such an event comes."""
        loop = asyncio.get_running_loop()
        while True:
            await loop.sock_sendall(self.socket, self.h2.data_to_send())
            async with asyncio.timeout(60):
                received = await loop.sock_recv(self.socket, 1 << 16)
            assert received, "the server closed the connection"
            for event in self.h2.receive_data(received):
                self.events.append(event)
                if isinstance(event, h2.events.DataReceived):
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if isinstance(event, until):
                    return event


@on_both_loops
async def test_the_h2_library_with_a_header_table_of_nothing() -> None:
    async with listening() as port:
        client = H2Client(port)
        with client.socket:
            client.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
            head = [(":method", "GET"), (":scheme", "http"), (":authority", "x")]
            for stream_id in (1, 3, 5):
                client.h2.send_headers(stream_id, [*head, (":path", "/size/100000")], end_stream=True)
                await client.talk(h2.events.StreamEnded)
            lengths = [len(event.data) for event in client.events if isinstance(event, h2.events.DataReceived)]
            assert sum(lengths) == 300_000


@on_both_loops
async def test_the_last_word_arrives_before_the_end() -> None:
    """The sending side ends after the GOAWAY, and what is unread does not reset the connection."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        writer.write(PREFACE + settings().encode() + b"\0\0\5\0\0\0\0\0\0wrong" + bytes(300_000))
        async with asyncio.timeout(60):
            received = await reader.read()
        assert b"DATA on stream 0" in received
        writer.close()
        await writer.wait_closed()
