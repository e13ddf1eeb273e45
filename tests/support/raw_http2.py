"""An HTTP/2 peer with which a test sends what it likes, frame by frame, and says what must come back.

Blocking sockets: the server runs in another thread. Nothing is answered behind the test's back except SETTINGS
(acknowledged) during the handshake; no window is ever enlarged unasked.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import hpack
from support.http2_frames import (
    HEAD_BYTES,
    PREFACE,
    ErrorCode,
    Fields,
    Frame,
    FrameType,
    data,
    encode,
    headers,
    settings,
    settings_ack,
    settings_of,
)

PATIENCE_S = 60.0
Address = tuple[str, int]
# What a socket raises when the server has closed its end.
_CLOSED = (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


@dataclass
class Answer:
    """What came back on one stream. `fields` are those of the last head; `trailers` is None until they come."""

    fields: dict[str, str] | None = None
    trailers: dict[str, str] | None = None
    body: bytearray = field(default_factory=bytearray)
    has_ended: bool = False
    # The DATA frames' payload lengths, in order.
    data_lengths: list[int] = field(default_factory=list)

    @property
    def status(self) -> int:
        assert self.fields is not None, "no head came"
        return int(self.fields[":status"])

    @property
    def is_trailers_only(self) -> bool:
        """One block of headers that ended the stream, as gRPC answers a call that fails at once."""
        return self.has_ended and self.trailers is None and not self.body

    @property
    def grpc_status(self) -> int:
        return int(self._grpc["grpc-status"])

    @property
    def grpc_message(self) -> str:
        return self._grpc.get("grpc-message", "")

    @property
    def _grpc(self) -> dict[str, str]:
        found = self.trailers if self.trailers is not None else self.fields
        assert found is not None, "no head came"
        return found

    @property
    def messages(self) -> list[bytes]:
        """The length-prefixed messages of the body."""
        found, at = [], 0
        while at < len(self.body):
            length = int.from_bytes(self.body[at + 1 : at + 5], "big")
            found.append(bytes(self.body[at + 5 : at + 5 + length]))
            at += 5 + length
        return found


@dataclass(frozen=True)
class Goaway:
    last_stream_id: int
    code: int
    debug: bytes


class Peer:
    """A connection; a context manager. `announces` is our first SETTINGS frame.

    With `shakes_hands` it returns once both sides have acknowledged each other's settings.
    """

    def __init__(
        self,
        address: Address,
        *,
        announces: Mapping[int, int] | None = None,
        shakes_hands: bool = True,
        tls: ssl.SSLContext | None = None,
        receive_buffer_bytes: int | None = None,
    ) -> None:
        self._socket: socket.socket = _connect(address, receive_buffer_bytes)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=address[0])
        self._received = bytearray()
        self._decoder = hpack.Decoder()
        self._open_block: tuple[int, int, bytearray] | None = None
        # What was received so far; `settings` are the server's.
        self.settings: dict[int, int] = {}
        self.num_settings_acks = 0
        self.answers: dict[int, Answer] = {}
        self.resets: dict[int, int] = {}
        self.goaways: list[Goaway] = []
        self.pings: list[bytes] = []
        self.pongs: list[bytes] = []
        self.window_updates: list[tuple[int, int]] = []
        self.num_frames = 0
        # The server closed the connection.
        self.is_closed = False
        self._last: deque[str] = deque(maxlen=20)
        if shakes_hands:
            try:
                self.shake_hands(announces or {})
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave, as a client that ends: what the server still sends is answered by the kernel with a reset."""
        self._socket.close()

    def vanish(self) -> None:
        """Leave by a TCP reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    # Sending

    def send_bytes(self, sent: bytes) -> None:
        """All of `sent`; what a server that has closed does not take is lost."""
        try:
            self._socket.sendall(sent)
        except _CLOSED:
            self._last.append("(could not send: the server has closed)")

    def send(self, *frames: Frame) -> None:
        self.send_bytes(encode(frames))

    def try_send(self, sent: bytes, timeout_s: float = 0.2) -> int:
        """As much of `sent` as the server takes; how much that was. Less than all: it does not read, or has closed."""
        self._socket.settimeout(timeout_s)
        view, num_sent = memoryview(sent), 0
        try:
            while num_sent < len(sent):
                num_sent += self._socket.send(view[num_sent : num_sent + 65536])
        except (TimeoutError, *_CLOSED):
            pass
        self._socket.settimeout(PATIENCE_S)
        return num_sent

    def shake_hands(self, announces: Mapping[int, int]) -> None:
        self.send_bytes(PREFACE + settings(announces).encode())
        self.until(lambda: bool(self.settings) and self.num_settings_acks > 0, "the server's SETTINGS and its ACK")
        self.send(settings_ack())

    def decode_with_table_of(self, size: int) -> None:
        """Hold the server to a HEADER_TABLE_SIZE: below the current size it must shrink its table first."""
        self._decoder.max_allowed_table_size = size

    def get(self, stream_id: int, path: str = "/", *more: tuple[str, str]) -> None:
        """Ask for `path` as HTTP."""
        self.send(headers(stream_id, get_fields(path, *more)))

    def call(self, stream_id: int, method: str, message: bytes = b"", *more: tuple[str, str]) -> None:
        """A unary gRPC call of a method of the test's service."""
        self.send(
            headers(stream_id, call_fields(method, *more), end=False), data(stream_id, prefixed(message), end=True)
        )

    # What must come back

    def expect_goaway(self, code: int | Iterable[int], debug: bytes | None = None) -> Goaway:
        """The server ends the connection with one of `code`, says so, and closes."""
        codes = {code} if isinstance(code, int) else set(code)
        self.until(lambda: self.is_closed, f"GOAWAY and the end, code {_names(codes)}", may_close=True)
        assert self.goaways, f"the connection was closed without GOAWAY; {self._history()}"
        told = self.goaways[-1]
        assert told.code in codes, (
            f"GOAWAY {_name(told.code)} {told.debug!r}, expected {_names(codes)}; {self._history()}"
        )
        assert debug is None or told.debug == debug, f"debug data {told.debug!r}, expected {debug!r}"
        return told

    def expect_reset(self, stream_id: int, code: int | Iterable[int]) -> None:
        """The server resets the stream with one of `code`, and the connection goes on."""
        codes = {code} if isinstance(code, int) else set(code)
        self.until(lambda: stream_id in self.resets, f"RST_STREAM of {stream_id}, {_names(codes)}")
        found = self.resets[stream_id]
        assert found in codes, f"RST_STREAM {_name(found)}, expected {_names(codes)}; {self._history()}"
        self.expect_alive()

    def expect_error(self, stream_id: int, code: int | Iterable[int]) -> None:
        """Either of both: RFC 9113, 5.4.1 lets a stream error be a connection error."""
        codes = {code} if isinstance(code, int) else set(code)
        self.until(lambda: self.is_closed or stream_id in self.resets, f"an error, {_names(codes)}", may_close=True)
        if stream_id in self.resets:
            self.expect_reset(stream_id, codes)
        else:
            self.expect_goaway(codes)

    def expect_answer(self, stream_id: int) -> Answer:
        """A complete answer."""
        answer = self.answer(stream_id)
        self.until(lambda: answer.has_ended or stream_id in self.resets, f"the end of the answer on stream {stream_id}")
        assert answer.has_ended, f"stream {stream_id} was reset: {_name(self.resets[stream_id])}; {self._history()}"
        return answer

    def expect_alive(self) -> None:
        """The connection goes on: what is sent until here has been read, and SETTINGS are acknowledged.

        Not by a PING: too many of those are an offence.
        """
        wanted = self.num_settings_acks + 1
        self.send(settings())
        self.until(lambda: self.num_settings_acks >= wanted, "an answer to SETTINGS")
        assert not self.goaways, f"the server is leaving: {self.goaways}"

    def expect_nothing_on(self, stream_id: int) -> None:
        """The connection goes on, and neither an answer nor a reset came on the stream."""
        self.expect_alive()
        assert stream_id not in self.resets, f"stream {stream_id} was reset: {_name(self.resets[stream_id])}"
        assert self.answer(stream_id).fields is None, f"stream {stream_id} was answered: {self.answer(stream_id)}"

    def expect_closed(self) -> None:
        """The server closes the connection, with or without a GOAWAY."""
        self.until(lambda: self.is_closed, "the end of the connection", may_close=True)

    def answer(self, stream_id: int) -> Answer:
        """What came so far on a stream."""
        return self.answers.setdefault(stream_id, Answer())

    def until(self, holds: Callable[[], bool], what: str, *, may_close: bool = False) -> None:
        """Read until `holds`. Fails, naming `what`, when the server closes first or nothing comes any more."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert may_close or not self.is_closed, f"the connection ended, expected {what}; {self._history()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}; {self._history()}"
            self.read_frame(what)

    def read_frame(self, what: str = "a frame") -> Frame | None:
        """Take the next frame in; None once the connection has ended."""
        head = self._read(HEAD_BYTES, what)
        if head is None:
            return None
        payload = self._read(int.from_bytes(head[:3], "big"), what)
        if payload is None:
            return None
        frame = Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
        self.num_frames += 1
        self._last.append(str(frame))
        self._take(frame)
        return frame

    def _read(self, count: int, what: str) -> bytes | None:
        while len(self._received) < count:
            try:
                piece = self._socket.recv(1 << 18)
            except TimeoutError:
                raise AssertionError(f"nothing came for {PATIENCE_S} s, expected {what}; {self._history()}") from None
            except _CLOSED:
                piece = b""
            if not piece:
                self.is_closed = True
                return None
            self._received += piece
        found = bytes(self._received[:count])
        del self._received[:count]
        return found

    def _take(self, frame: Frame) -> None:
        match frame.type:
            case FrameType.HEADERS | FrameType.CONTINUATION:
                self._take_block(frame)
            case FrameType.DATA:
                answer = self.answer(frame.stream_id)
                answer.body += frame.payload
                answer.data_lengths.append(len(frame.payload))
                answer.has_ended |= frame.ends_stream
            case FrameType.SETTINGS if frame.is_ack:
                self.num_settings_acks += 1
            case FrameType.SETTINGS:
                self.settings |= settings_of(frame.payload)
            case FrameType.PING:
                (self.pongs if frame.is_ack else self.pings).append(frame.payload)
            case FrameType.RST_STREAM:
                self.resets[frame.stream_id] = frame.number()
            case FrameType.WINDOW_UPDATE:
                self.window_updates.append((frame.stream_id, frame.number()))
            case FrameType.GOAWAY:
                self.goaways.append(Goaway(frame.number(), frame.number(4), frame.payload[8:]))

    def _take_block(self, frame: Frame) -> None:
        if frame.type == FrameType.HEADERS:
            self._open_block = (frame.stream_id, frame.flags, bytearray())
        assert self._open_block is not None, "CONTINUATION without HEADERS"
        stream_id, flags, received = self._open_block
        assert stream_id == frame.stream_id, "CONTINUATION of another stream"
        received += frame.payload
        if not frame.flags & 0x04:
            return
        self._open_block = None
        fields = dict(self._decoder.decode(bytes(received)))
        answer = self.answer(stream_id)
        if answer.fields is None or ":status" in fields:
            answer.fields = fields
        else:
            answer.trailers = fields
        answer.has_ended |= bool(flags & 0x01)

    def _history(self) -> str:
        return "last received: " + ("; ".join(self._last) or "nothing")


def get_fields(path: str = "/", *more: tuple[str, str], method: str = "GET") -> Fields:
    """The head of an HTTP request."""
    return [(":method", method), (":scheme", "http"), (":path", path), (":authority", "test"), *more]


def call_fields(method: str, *more: tuple[str, str]) -> Fields:
    """The head of a gRPC call: a method of the test's service, or a path."""
    path = method if method.startswith("/") else f"/test.Wire/{method}"
    grpc = [("content-type", "application/grpc"), ("te", "trailers")]
    return [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"), *grpc, *more]


def prefixed(message: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A gRPC message with its five bytes before it; `length` where a test lies about it."""
    return bytes((flag,)) + (len(message) if length is None else length).to_bytes(4, "big") + message


def _connect(address: Address, receive_buffer_bytes: int | None) -> socket.socket:
    connected = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connected.settimeout(PATIENCE_S)
    if receive_buffer_bytes is not None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        connected.connect(address)
    except OSError:
        connected.close()
        raise
    return connected


def _name(code: int) -> str:
    return ErrorCode(code).name if code in ErrorCode.__members__.values() else f"{code:#x}"


def _names(codes: Iterable[int]) -> str:
    return " or ".join(_name(code) for code in sorted(codes))
