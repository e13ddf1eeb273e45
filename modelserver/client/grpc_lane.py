"""gRPC for load: a lane is one call at a time on a shared connection, or a bidirectional stream that stays open."""

from __future__ import annotations

import abc
import asyncio
from time import monotonic_ns
from typing import Final

from modelserver.client.grpc_messages import PREFIX_BYTES, read_stream_answer, unframe
from modelserver.client.grpc_pool import WINDOW_BYTES, ConnectingCall, GrpcPool, describe_end
from modelserver.client.h2_connection import H2Connection, SentCall
from modelserver.client.h2_heads import AnswerBlock
from modelserver.client.lane import Answers, Lane

_OK: Final = 0
# Before a lane whose server cannot be reached is free again.
_RECONNECT_DELAY_S: Final = 0.05
# Of an answer: what no window is too small for.
_WIDEN_BYTES: Final = WINDOW_BYTES // 4


class _PoolLane(Lane, ConnectingCall):
    """A lane on the connections of a pool, whose owner opens and closes them."""

    def __init__(self, pool: GrpcPool, answers: Answers) -> None:
        super().__init__(answers)
        self._pool = pool
        self._request = b""
        self._sent: SentCall | None = None

    async def connect(self) -> None:
        """The owner of the pool prepares it."""

    def close(self) -> None:
        """The owner of the pool ends it."""

    def unreachable(self, reason: str) -> None:
        asyncio.get_running_loop().call_later(_RECONNECT_DELAY_S, self._fail, reason)

    def lost(self, reason: str, code: int | None, *, is_refused: bool) -> None:
        del code, is_refused
        self._fail(reason)

    @abc.abstractmethod
    def _fail(self, failure: str) -> None:
        """The call has ended without its answer."""


class GrpcLane(_PoolLane):
    """One unary call at a time."""

    def __init__(self, pool: GrpcPool, answers: Answers) -> None:
        super().__init__(pool, answers)
        # That of the last call.
        self._connection: H2Connection
        self._num_received = 0
        self._num_expected = -1
        self._start = b""
        self._pieces: list[bytes] = []
        self._problem: str | None = None

    def send(self, request: bytes) -> None:
        self._num_received = 0
        self._num_expected = -1
        self._request = request
        self.start_ns = monotonic_ns()
        if self._sent is not None:
            connection = self._connection
            # Mostly `has_room`, spelled out because this is the cost of a request.
            if not connection.is_leaving and len(connection.calls) < connection.max_calls:
                self._sent = connection.open(self, request)
                self.sent_ns = monotonic_ns()
                return
        self._pool.begin(self)

    def connected(self, connection: H2Connection) -> None:
        self._connection = connection
        self._sent = connection.open(self, self._request)
        self.sent_ns = monotonic_ns()

    def begun(self, head: AnswerBlock) -> None:
        self.first_ns = self._connection.read_ns
        if head.http_status != 200:
            self._problem = f"HTTP {head.http_status}"

    def more(self, data: bytes) -> None:
        self._num_received += len(data)
        if self._num_received >= _WIDEN_BYTES and self._sent is not None:
            self._sent.widen()
        if self._num_expected < 0:
            if len(data) >= PREFIX_BYTES and not self._start:
                self._num_expected = PREFIX_BYTES + int.from_bytes(data[1:PREFIX_BYTES], "big")
            else:
                self._expect(data)
        if self.keeps_answer:
            self._pieces.append(data)

    def _expect(self, data: bytes) -> None:
        """Read the length of the message, which comes in pieces itself."""
        start = self._start = self._start + data
        if len(start) >= PREFIX_BYTES:
            self._num_expected = PREFIX_BYTES + int.from_bytes(start[1:PREFIX_BYTES], "big")
            self._start = b""

    def ended(self, trailers: AnswerBlock | None) -> None:
        problem = self._problem
        if problem is None and trailers is not None and trailers.grpc_status == _OK:
            if self._num_received == self._num_expected:
                if self.keeps_answer:
                    self.answer = b"".join(self._pieces)
                    self._pieces.clear()
                self.answers.answered(self, self._connection.read_ns, None)
                return
            problem = f"expected one message of {self._num_expected} bytes, got {self._num_received} bytes"
        self._fail(problem or describe_end(trailers))

    def _fail(self, failure: str) -> None:
        self._pieces.clear()
        self._start = b""
        self._problem = None
        self.answers.answered(self, monotonic_ns(), failure)


class StreamLane(_PoolLane):
    """ModelStreamInfer: requests one after the other on a call that stays open.

    A request of a decoupled model is over with its final response, any other one with its response.
    """

    def __init__(self, pool: GrpcPool, answers: Answers, *, is_decoupled: bool, algorithm: str) -> None:
        super().__init__(pool, answers)
        self._is_decoupled = is_decoupled
        self._algorithm = algorithm
        self._has_request = False
        self._buffer = b""

    def send(self, request: bytes) -> None:
        self._has_request = True
        self.first_ns = 0
        self.response_times = []
        self.start_ns = monotonic_ns()
        if self._sent is not None:
            self._sent.send(request, is_whole=False)
            self.sent_ns = monotonic_ns()
        else:
            self._request = request
            self._pool.begin(self)

    def connected(self, connection: H2Connection) -> None:
        self._sent = connection.open(self, self._request, is_whole=False)
        self.sent_ns = monotonic_ns()

    def begun(self, head: AnswerBlock) -> None:
        """Says nothing about a request; a stream that is refused ends at once."""

    def more(self, data: bytes) -> None:
        now_ns = monotonic_ns()
        if self._sent is not None:
            self._sent.widen()
        data = self._buffer + data if self._buffer else data
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

    def ended(self, trailers: AnswerBlock | None) -> None:
        self._fail("the server ended the stream: " + describe_end(trailers))

    def _fail(self, failure: str) -> None:
        self._sent = None
        self._buffer = b""
        self._finish(monotonic_ns(), failure)

    def _finish(self, now_ns: int, failure: str | None) -> None:
        if self._has_request:
            self._has_request = False
            self.answers.answered(self, now_ns, failure)
