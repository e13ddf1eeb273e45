"""gRPC for load: a lane is one call at a time on a shared connection, or a bidirectional stream that stays open."""

from __future__ import annotations

from time import monotonic_ns
from urllib.parse import unquote_to_bytes

from modelserver.client.grpc_messages import PREFIX_BYTES, read_stream_answer, status_name, unframe
from modelserver.client.h2_connection import WINDOW_STEP, H2Connection
from modelserver.client.h2_incoming import Head
from modelserver.client.lane import Answers, Lane

_OK = 0


def describe_end(head: Head | None) -> str:
    """The message in the fields that end a failed call."""
    if head is None:
        return "the stream ended without a gRPC status"
    if head.grpc_status is None:
        return f"HTTP {head.http_status} without a gRPC status"
    message = unquote_to_bytes(head.grpc_message).decode(errors="replace")
    return f"{status_name(head.grpc_status)}: {message}"


class GrpcLane(Lane):
    """One unary call at a time."""

    def __init__(self, connection: H2Connection, answers: Answers) -> None:
        super().__init__(answers)
        self._connection = connection
        self._num_received = 0
        self._num_expected = -1
        self._start = b""
        self._pieces: list[bytes] = []
        self._problem: str | None = None

    async def connect(self) -> None:
        """The connection is shared: its owner opens it."""

    def send(self, request: bytes) -> None:
        self._num_received = 0
        self._num_expected = -1
        self.start_ns = monotonic_ns()
        self._connection.open(self, request)
        self.sent_ns = monotonic_ns()

    def close(self) -> None:
        """The connection is shared: its owner closes it."""

    def on_open(self, stream_id: int) -> None:
        del stream_id
        self.sent_ns = monotonic_ns()

    def on_head(self, head: Head, now_ns: int) -> None:
        self.first_ns = now_ns
        if head.http_status != 200:
            self._problem = f"HTTP {head.http_status}"

    def on_data(self, buffer: bytes, start: int, end: int, now_ns: int) -> None:  # noqa: ARG002  (see Stream)
        self._num_received += end - start
        if self._num_expected < 0:
            self._expect(buffer, start, end)
        if self.keeps_answer:
            self._pieces.append(buffer[start:end])

    def _expect(self, buffer: bytes, start: int, end: int) -> None:
        """Read the length of the message, which may come in pieces itself."""
        if end - start >= PREFIX_BYTES and not self._start:
            self._num_expected = PREFIX_BYTES + int.from_bytes(buffer[start + 1 : start + PREFIX_BYTES], "big")
            return
        self._start += buffer[start:end]
        if len(self._start) >= PREFIX_BYTES:
            self._num_expected = PREFIX_BYTES + int.from_bytes(self._start[1:PREFIX_BYTES], "big")
            self._start = b""

    def on_end(self, head: Head | None, now_ns: int, problem: str | None) -> None:
        if problem is None and self._problem is None and head is not None and head.grpc_status == _OK:
            if self._num_received == self._num_expected:
                if self.keeps_answer:
                    self.answer = b"".join(self._pieces)
                    self._pieces.clear()
                self.answers.answered(self, now_ns, None)
                return
            problem = f"expected one message of {self._num_expected} bytes, got {self._num_received} bytes"
        failure = problem or self._problem or describe_end(head)
        self._pieces.clear()
        self._start = b""
        self._problem = None
        self.answers.answered(self, now_ns, failure)


class StreamLane(Lane):
    """ModelStreamInfer: requests one after the other on a call that stays open.

    A request of a decoupled model is over with its final response, any other one with its response.
    """

    def __init__(self, connection: H2Connection, answers: Answers, *, is_decoupled: bool, algorithm: str) -> None:
        super().__init__(answers)
        self._connection = connection
        self._is_decoupled = is_decoupled
        self._algorithm = algorithm
        self._stream_id = 0
        self._has_request = False
        self._buffer = b""
        self._unacknowledged = 0

    async def connect(self) -> None:
        """The connection is shared: its owner opens it."""

    def send(self, request: bytes) -> None:
        self._has_request = True
        self.first_ns = 0
        self.response_times = []
        self.start_ns = monotonic_ns()
        if self._stream_id:
            self._connection.send(self._stream_id, request)
        else:
            self._stream_id = self._connection.open(self, request, ends=False)
        self.sent_ns = monotonic_ns()

    def close(self) -> None:
        """The connection is shared: its owner closes it."""

    def on_open(self, stream_id: int) -> None:
        self._stream_id = stream_id
        self.sent_ns = monotonic_ns()

    def on_head(self, head: Head, now_ns: int) -> None:
        """Says nothing about a request; a stream that is refused ends at once."""

    def on_data(self, buffer: bytes, start: int, end: int, now_ns: int) -> None:
        self._unacknowledged += end - start
        if self._unacknowledged >= WINDOW_STEP:
            self._connection.acknowledge(self._stream_id, self._unacknowledged)
            self._unacknowledged = 0
        data = self._buffer + buffer[start:end] if self._buffer else buffer[start:end]
        offset = 0
        while len(data) - offset >= PREFIX_BYTES:
            stop = offset + PREFIX_BYTES + int.from_bytes(data[offset + 1 : offset + PREFIX_BYTES], "big")
            if stop > len(data):
                break
            self._take(data[offset:stop], now_ns)
            offset = stop
        self._buffer = data[offset:]

    def _take(self, framed: bytes, now_ns: int) -> None:
        try:
            message = unframe(framed, self._algorithm)
            answer = read_stream_answer(message)
        except (ValueError, OSError) as error:
            self._finish(now_ns, f"cannot read a response: {error}")
            return
        if not self._has_request:
            return
        if not self.first_ns:
            self.first_ns = now_ns
        if answer.error:
            self._finish(now_ns, answer.error)
            return
        if answer.has_outputs or not self._is_decoupled:
            self.response_times.append(now_ns)
            if self.keeps_answer:
                self.answer = message
            self.answers.responded(self)
        if answer.is_final or not self._is_decoupled:
            self._finish(now_ns, None)

    def on_end(self, head: Head | None, now_ns: int, problem: str | None) -> None:
        self._stream_id = 0
        self._buffer = b""
        self._unacknowledged = 0
        if self._has_request:
            self._finish(now_ns, problem or "the server ended the stream: " + describe_end(head))

    def _finish(self, now_ns: int, failure: str | None) -> None:
        if self._has_request:
            self._has_request = False
            self.answers.answered(self, now_ns, failure)
