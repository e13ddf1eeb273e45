"""The gRPC client against the `h2` library as the server, and against frames that a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from modelserver.client.address import Address
from modelserver.client.grpc_lane import GrpcLane, StreamLane
from modelserver.client.grpc_messages import frame
from modelserver.client.grpc_pool import GrpcPool
from modelserver.client.heads import GrpcRequestHead
from modelserver.client.lane import Lane
from modelserver.errors import UnavailableError
from modelserver.pb import grpc_service_pb2 as pb

HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]
Respond = Callable[["Peer", int, bytes], None]


class Peer(asyncio.Protocol):
    """A server whose every complete request, or message of a stream, is given to `respond`."""

    def __init__(self, respond: Respond, settings: dict[int, int], *, by_message: bool) -> None:
        self._respond = respond
        self._settings = settings
        self._by_message = by_message
        self.bodies: dict[int, bytearray] = {}
        self.has_ended = False
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        # Settings that are in force from the first frame on.
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=self._settings)
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data)
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if self._by_message:
                    self._take_messages(event.stream_id)
            elif isinstance(event, h2.events.StreamEnded) and not self._by_message:
                self._respond(self, event.stream_id, bytes(self.bodies.pop(event.stream_id)))
            elif isinstance(event, h2.events.StreamEnded):
                self.has_ended = True
        self.flush()

    def _take_messages(self, stream_id: int) -> None:
        body = self.bodies[stream_id]
        while len(body) >= 5 and len(body) >= 5 + int.from_bytes(body[1:5], "big"):
            size = 5 + int.from_bytes(body[1:5], "big")
            message = bytes(body[:size])
            del body[:size]
            self._respond(self, stream_id, message)

    def answer(self, stream_id: int, data: bytes, trailers: list[tuple[str, str]]) -> None:
        self.h2.send_headers(stream_id, HEADERS)
        for at in range(0, len(data), 16384):
            self.h2.send_data(stream_id, data[at : at + 16384])
        self.h2.send_headers(stream_id, trailers, end_stream=True)


class Told:
    def __init__(self) -> None:
        self.failures: asyncio.Queue[tuple[Lane, str | None]] = asyncio.Queue()
        self.num_responses = 0

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        self.failures.put_nowait((lane, failure))

    def responded(self, lane: Lane) -> None:
        self.num_responses += 1

    async def next(self) -> str | None:
        async with asyncio.timeout(60):
            return (await self.failures.get())[1]


@asynccontextmanager
async def connected(
    respond: Respond, *, settings: dict[int, int] | None = None, by_message: bool = False
) -> AsyncIterator[GrpcPool]:
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(respond, settings or {}, by_message=by_message))
        return peers[-1]

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    pool = GrpcPool(address, fields=GrpcRequestHead(address, "ModelInfer").fields)
    await pool.prepare()
    try:
        yield pool
    finally:
        pool.abandon()
        server.close()
        for peer in peers:
            peer.transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def echo(peer: Peer, stream_id: int, body: bytes) -> None:
    peer.answer(stream_id, body, OK)


async def test_many_calls_on_one_connection() -> None:
    told = Told()
    async with connected(echo) as pool:
        lanes = [GrpcLane(pool, told) for _ in range(10)]
        for round_number in range(20):
            for lane in lanes:
                lane.keeps_answer = True
                lane.send(frame(b"%d" % round_number))
            assert [await told.next() for _ in lanes] == [None] * 10
            assert {lane.answer for lane in lanes} == {frame(b"%d" % round_number)}


@pytest.mark.parametrize("window", [1000, 65535, 2**20])
async def test_large_messages_keep_to_the_windows_of_the_server(window: int) -> None:
    """The library refuses a client that sends more than it may."""
    told = Told()
    settings = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
    async with connected(echo, settings=settings) as pool:
        lanes = [GrpcLane(pool, told) for _ in range(3)]
        for lane in lanes:
            lane.keeps_answer = True
            lane.send(frame(bytes(300_000)))
        assert [await told.next() for _ in lanes] == [None] * 3
        assert {len(lane.answer) for lane in lanes} == {300_005}


async def test_calls_beyond_the_allowed_streams_have_further_connections() -> None:
    told = Told()
    settings = {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 2}
    async with connected(echo, settings=settings) as pool:
        for _ in range(7):
            GrpcLane(pool, told).send(frame(b"x"))
        assert [await told.next() for _ in range(7)] == [None] * 7


@pytest.mark.parametrize("table_bytes", [0, 4096])
async def test_a_server_may_do_without_a_table(table_bytes: int) -> None:
    told = Told()
    settings = {h2.settings.SettingCodes.HEADER_TABLE_SIZE: table_bytes}
    async with connected(echo, settings=settings) as pool:
        lane = GrpcLane(pool, told)
        for _ in range(3):
            lane.send(frame(b"x"))
            assert await told.next() is None


def _error(peer: Peer, stream_id: int, body: bytes) -> None:
    peer.h2.send_headers(stream_id, [*HEADERS, ("grpc-status", "3"), ("grpc-message", "not%20this")], end_stream=True)


def _short(peer: Peer, stream_id: int, body: bytes) -> None:
    peer.answer(stream_id, body[:-1], OK)


def _no_status(peer: Peer, stream_id: int, body: bytes) -> None:
    peer.answer(stream_id, body, [("x", "y")])


def _no_trailers(peer: Peer, stream_id: int, body: bytes) -> None:
    peer.h2.send_headers(stream_id, HEADERS)
    peer.h2.send_data(stream_id, body, end_stream=True)


def _reset(peer: Peer, stream_id: int, body: bytes) -> None:
    peer.h2.reset_stream(stream_id, 11)


def _gone(peer: Peer, stream_id: int, body: bytes) -> None:
    peer.transport.close()


@pytest.mark.parametrize(
    ("respond", "failure"),
    [
        (_error, "INVALID_ARGUMENT: not this"),
        (_short, "expected one message of 9 bytes, got 8 bytes"),
        (_no_status, "HTTP None without a gRPC status"),
        (_no_trailers, "the stream ended without a gRPC status"),
        (_reset, "the server reset the stream: ENHANCE_YOUR_CALM"),
        (_gone, "the server closed the connection"),
    ],
)
async def test_what_is_no_answer_is_told(respond: Respond, failure: str) -> None:
    told = Told()
    num_asked = 0

    def once(peer: Peer, stream_id: int, body: bytes) -> None:
        nonlocal num_asked
        num_asked += 1
        (respond if num_asked == 1 else echo)(peer, stream_id, body)

    async with connected(once) as pool:
        lane = GrpcLane(pool, told)
        lane.send(frame(b"four"))
        assert await told.next() == failure
        # The lane can go on, on a new connection if need be.
        lane.send(frame(b"four"))
        assert await told.next() is None


@pytest.mark.parametrize(
    ("raw", "failure"),
    [
        (b"\0\0\5\4\0\0\0\0\0" + bytes(5), "SETTINGS of 5 bytes"),
        (b"\0\0\0\0\x08\0\0\0\1", "a padded frame without the length"),
        (b"\0\0\0\x09\4\0\0\0\1", "continues nothing"),
        (b"\0\0\0\5\4\0\0\0\1", "the server pushes"),
        (b"\0\0\1\1\4\0\0\0\1\xff", "an index is beyond the table"),
    ],
    ids=["settings", "padding", "continuation", "push", "head"],
)
async def test_frames_that_are_broken_end_the_connection_and_not_the_lane(raw: bytes, failure: str) -> None:
    told = Told()
    num_asked = 0

    def once(peer: Peer, stream_id: int, body: bytes) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            peer.transport.write(raw)
        else:
            echo(peer, stream_id, body)

    async with connected(once) as pool:
        lane = GrpcLane(pool, told)
        lane.send(frame(b"four"))
        assert failure in (await told.next() or "")
        lane.send(frame(b"four"))
        assert await told.next() is None


async def test_a_server_that_goes_away_politely_costs_no_call() -> None:
    told = Told()
    num_asked = 0

    def respond(peer: Peer, stream_id: int, body: bytes) -> None:
        nonlocal num_asked
        num_asked += 1
        echo(peer, stream_id, body)
        if num_asked == 3:
            peer.h2.close_connection(last_stream_id=stream_id)

    async with connected(respond) as pool:
        lane = GrpcLane(pool, told)
        for _ in range(6):
            lane.send(frame(b"x"))
            assert await told.next() is None


async def test_pings_are_answered() -> None:
    told = Told()

    def respond(peer: Peer, stream_id: int, body: bytes) -> None:
        peer.h2.ping(b"12345678")
        peer.flush()
        echo(peer, stream_id, body)

    async with connected(respond) as pool:
        lane = GrpcLane(pool, told)
        for _ in range(2):
            lane.send(frame(b"x"))
            assert await told.next() is None


def responses(*finals: bool | None, error: str = "") -> Respond:
    """A stream that answers each message with so many responses."""
    begun: set[tuple[int, int]] = set()

    def respond(peer: Peer, stream_id: int, message: bytes) -> None:
        if (id(peer), stream_id) not in begun:
            begun.add((id(peer), stream_id))
            peer.h2.send_headers(stream_id, HEADERS)
        for is_final in finals:
            answer = pb.ModelStreamInferResponse(error_message=error)
            if is_final is not None:
                answer.infer_response.parameters["triton_final_response"].bool_param = is_final
            if not is_final:
                answer.infer_response.raw_output_contents.append(b"x")
            peer.h2.send_data(stream_id, frame(answer.SerializeToString()))

    return respond


async def test_a_stream_answers_requests_one_after_the_other() -> None:
    told = Told()
    async with connected(responses(None), by_message=True) as pool:
        lane = StreamLane(pool, told, is_decoupled=False, algorithm="none")
        for _ in range(5):
            lane.send(frame(b"x" * 100))
            assert await told.next() is None
            assert len(lane.response_times) == 1


async def test_a_decoupled_request_is_over_with_its_final_response() -> None:
    told = Told()
    async with connected(responses(False, False, False, True), by_message=True) as pool:
        lane = StreamLane(pool, told, is_decoupled=True, algorithm="none")
        for number in (1, 2):
            lane.send(frame(b"x"))
            assert await told.next() is None
            # The empty final one brings nothing, and is not counted.
            assert len(lane.response_times) == 3
            assert told.num_responses == 3 * number


async def test_an_error_within_a_stream_ends_the_request_only() -> None:
    told = Told()
    async with connected(responses(None, error="no such shape"), by_message=True) as pool:
        lane = StreamLane(pool, told, is_decoupled=False, algorithm="none")
        for _ in range(2):
            lane.send(frame(b"x"))
            assert await told.next() == "no such shape"


async def test_streams_are_ended_before_the_connection_is_closed() -> None:
    told = Told()
    peers: list[Peer] = []

    def respond(peer: Peer, stream_id: int, message: bytes) -> None:
        peers.append(peer)
        responses(None)(peer, stream_id, message)

    async with connected(respond, by_message=True) as pool:
        lane = StreamLane(pool, told, is_decoupled=False, algorithm="none")
        lane.send(frame(b"x"))
        assert await told.next() is None
        assert peers[0].h2.open_inbound_streams == 1
        finishing = asyncio.create_task(pool.finish(5))
        async with asyncio.timeout(60):
            while not peers[0].has_ended:  # noqa: ASYNC110  (a test's patience)
                await asyncio.sleep(0.001)
        peers[0].h2.send_headers(1, OK, end_stream=True)
        peers[0].flush()
        await finishing
        assert told.failures.empty()


async def test_a_port_that_speaks_no_http2() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(UnavailableError, match="does it speak gRPC"):
        await GrpcPool(address).prepare()
    server.close()
    await asyncio.sleep(0)
