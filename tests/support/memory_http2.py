"""An HTTP/2 peer without sockets: frames go in and come out of a connection in the same turn of the loop."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping

import hpack
from support.http2_frames import (
    HEAD_BYTES,
    PREFACE,
    Fields,
    Frame,
    FrameType,
    data,
    encode,
    headers,
    settings,
    settings_ack,
)
from support.memory_transport import MemoryTransport, receive
from support.raw_http2 import Answer, call_fields, get_fields, prefixed
from support.wire_frontends import GrpcExamples, HttpExamples

from modelserver.protocol.call import Method
from modelserver.telemetry.wire_counts import Violation, WireCounts
from modelserver.wire.context import Outbox, WireContext
from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.limits import WireLimits


async def until(holds: Callable[[], bool], patience_s: float = 60.0) -> None:
    """Let the loop run until `holds`; for what takes real time. Fails with TimeoutError."""
    async with asyncio.timeout(patience_s):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


class SlowTransport(MemoryTransport):
    """A transport whose peer does not read: what is written stays in its buffer until `drain`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_buffered = 0
        self.is_slow = False
        self.num_writes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self.num_writes += 1
        if self.is_slow:
            self.num_buffered += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_buffered


class MemoryPeer:
    """The client of one connection, which is made on the running loop. Settings are exchanged already.

    What the connection has written is taken in by `read`; `frames` are those of the last `read`.
    """

    def __init__(
        self,
        limits: WireLimits | None = None,
        *,
        announces: Mapping[int, int] | None = None,
        methods: Mapping[str, Method] | None = None,
        has_http: bool = True,
        has_grpc: bool = True,
        greets: bool = True,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.grpc, self.http = GrpcExamples(), HttpExamples()
        if methods is not None:
            self.grpc.methods = methods
        self.context = WireContext(
            loop,
            self.http if has_http else None,
            self.grpc if has_grpc else None,
            limits or WireLimits(),
            WireCounts(),
            Outbox(loop),
        )
        self.transport = SlowTransport()
        self.connection = Http2Connection(self.context)
        self.answers: dict[int, Answer] = {}
        self.resets: dict[int, int] = {}
        self.frames: list[Frame] = []
        self._decoder = hpack.Decoder()
        self._num_read = 0
        self.connection.begin(self.transport, b"")
        if greets:
            receive(self.connection, PREFACE)
            self.send(settings(announces or {}), settings_ack())

    def send(self, *frames: Frame) -> list[Frame]:
        """Send the frames together; returns what is written in the same turn."""
        receive(self.connection, encode(frames))
        return self.read()

    def call(self, stream_id: int, method: str, message: bytes = b"", *fields: tuple[str, str]) -> list[Frame]:
        """A whole unary call."""
        head = headers(stream_id, call_fields(method, *fields), end=False)
        return self.send(head, data(stream_id, prefixed(message), end=True))

    def open(self, stream_id: int, method: str, *fields: tuple[str, str]) -> list[Frame]:
        """A call that goes on."""
        return self.send(headers(stream_id, call_fields(method, *fields), end=False))

    def get(self, stream_id: int, path: str, *fields: tuple[str, str], method: str = "GET") -> list[Frame]:
        return self.send(headers(stream_id, get_fields(path, *fields, method=method)))

    def post(self, stream_id: int, path: str, body: bytes, *fields: tuple[str, str]) -> list[Frame]:
        request: Fields = get_fields(path, *fields, method="POST")
        return self.send(headers(stream_id, request, end=False), data(stream_id, body, end=True))

    def read(self) -> list[Frame]:
        """The frames that were written since the last time."""
        written = bytes(self.transport.written[self._num_read :])
        self._num_read += len(written)
        self.frames = []
        at = 0
        while at < len(written):
            high, low, kind, flags, stream_id = struct.unpack_from(">HBBBI", written, at)
            start, at = at + HEAD_BYTES, at + HEAD_BYTES + (high << 8 | low)
            self.frames.append(Frame(kind, flags, stream_id, written[start:at]))
            self._take(self.frames[-1])
        return self.frames

    async def settle(self, num_turns: int = 5) -> list[Frame]:
        """Give tasks and scheduled writes their turns, then `read`."""
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return self.read()

    async def until_answered(self, stream_id: int) -> Answer:
        """The complete answer, for which other threads may be needed."""
        await until(lambda: self.read() is not None and self.answer(stream_id).has_ended)
        return self.answer(stream_id)

    def answer(self, stream_id: int) -> Answer:
        """What came so far on a stream."""
        return self.answers.setdefault(stream_id, Answer())

    def of_type(self, kind: FrameType, stream_id: int | None = None) -> list[Frame]:
        """Those of the last `read`."""
        return [frame for frame in self.frames if frame.type == kind and stream_id in (None, frame.stream_id)]

    @property
    def goaways(self) -> list[tuple[int, int, bytes]]:
        """Last stream, code and debug data of each GOAWAY of the last `read`."""
        return [(frame.number(), frame.number(4), frame.payload[8:]) for frame in self.of_type(FrameType.GOAWAY)]

    @property
    def violations(self) -> dict[Violation, int]:
        return {violation: count for (_, violation), count in self.context.counts.violations.items()}

    def pass_time(self, seconds: float) -> None:
        """Look after the connection now, and as if `seconds` later."""
        now_s = self.context.loop.time()
        self.connection.sweep(now_s)
        self.connection.sweep(now_s + seconds)
        self.read()

    def leave(self) -> None:
        """The client is gone."""
        self.transport.is_lost = True
        self.connection.connection_lost(None)

    def _take(self, frame: Frame) -> None:
        answer = self.answer(frame.stream_id)
        if frame.type == FrameType.HEADERS:
            fields = dict(self._decoder.decode(frame.payload))
            if answer.fields is None:
                answer.fields = fields
            else:
                answer.trailers = fields
        elif frame.type == FrameType.DATA:
            answer.body += frame.payload
            answer.data_lengths.append(len(frame.payload))
        elif frame.type == FrameType.RST_STREAM:
            self.resets[frame.stream_id] = frame.number()
        answer.has_ended |= frame.ends_stream
