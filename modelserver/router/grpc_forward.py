"""One gRPC call on its way through the router: its frames go to a replica, and the replica's to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from modelserver.client.grpc_pool import ConnectingCall
from modelserver.client.h2_connection import H2Connection, SentCall
from modelserver.client.h2_heads import AnswerBlock
from modelserver.core.tensor import Buffer
from modelserver.endpoints.endpoint import Endpoint, Outcome
from modelserver.errors import ServerError, UnavailableError
from modelserver.protocol.grpc_status import Status
from modelserver.router.affinity import SESSION_HEADER, sequence_of_message
from modelserver.router.http_forward import HOPS, MAX_HOPS, num_hops
from modelserver.router.replicas import Replicas, Waiting
from modelserver.telemetry.access_log import AccessEntry
from modelserver.wire.address import peer_of
from modelserver.wire.http2.frame import END_STREAM, ErrorCode, window_update
from modelserver.wire.http2.grpc_ending import end_call
from modelserver.wire.http2.head import RequestHead
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.sender import Outgoing
from modelserver.wire.http2.stream import ANSWERED, RUNNING, STREAM_SLOTS, Connection, Http2Stream, Route

# Of a request: kept until the replica's answer begins, so that it can be sent again.
_MAX_KEPT_BYTES: Final = 1 << 20
# Bytes that wait to be sent, beyond which the other side gets no further window.
_MAX_UNSENT_BYTES: Final = 256 * 1024
_TIMEOUT: Final = b"grpc-timeout"
_MAX_TIMEOUT_DIGITS: Final = 8
_UNITS: Final = ((b"u", 1_000), (b"m", 1_000_000), (b"S", 1_000_000_000), (b"M", 60_000_000_000))
_NAMES: Final = {status.value: status.name for status in Status}
_SERVER_FAULTS: Final = frozenset({Status.UNKNOWN, Status.INTERNAL, 15})


class CallPassage:
    """What calls of one head have in common: the block that replicas get, but for the timeout, and the session."""

    __slots__ = ("block", "num_hops", "session")

    def __init__(self, head: RequestHead, peer: str) -> None:
        found = dict(head.fields)
        self.num_hops = num_hops(found.get(HOPS.encode(), b"").decode("latin-1"))
        self.session = found.get(SESSION_HEADER.encode(), b"")
        unsent = (_TIMEOUT, HOPS.encode(), b"x-forwarded-for")
        block = b"".join([literal(name, value) for name, value in head.fields if name not in unsent])
        via, client = found.get(b"x-forwarded-for", b""), peer.rpartition(":")[0].strip("[]").encode("latin-1")
        if client:
            block += literal(b"x-forwarded-for", (via + b", " if via else b"") + client)
        self.block = block + literal(HOPS.encode(), b"%d" % (self.num_hops + 1))


def timeout_field(timeout_ns: int) -> bytes:
    """The field of a timeout, in the finest unit whose number is short enough."""
    for unit, unit_ns in _UNITS:
        number = b"%d" % max(1, timeout_ns // unit_ns)
        if len(number) <= _MAX_TIMEOUT_DIGITS:
            return literal(_TIMEOUT, number + unit)
    return b""


class ForwardedCall(Http2Stream, ConnectingCall, Waiting):
    """A call, unary or a stream, from its HEADERS to the end of its answer."""

    __slots__ = (
        *STREAM_SLOTS,
        "_call",
        "_credit",
        "_endpoint",
        "_has_begun",
        "_is_kept",
        "_is_over",
        "_kept",
        "_log",
        "_num_kept",
        "_num_sent",
        "_passage",
        "_replicas",
        "_session",
        "_start_ns",
        "_tried",
    )
    relays = True

    def __init__(self, replicas: Replicas, connection: Connection, stream_id: int, route: Route) -> None:
        self.connection = connection
        self.id = stream_id
        self.route = route
        # A handler has it from the start: the replica sets the limits of slow requests.
        self.phase = RUNNING
        self.is_ended = False
        self.num_received = 0
        self.send_window = connection.sender.initial_window
        self.receive_window = connection.initial_window
        self.outgoing: Outgoing | None = None
        self._replicas = replicas
        self._passage = self._passage_of(route.head)
        self._session = self._passage.session
        self._kept: list[Buffer] = []
        self._num_kept = 0
        self._is_kept = True
        # Bytes received and not yet returned to the client's window.
        self._credit = 0
        self._tried: tuple[Endpoint, ...] = ()
        self._endpoint: Endpoint | None = None
        self._call: SentCall | None = None
        self._start_ns = 0
        self._has_begun = False
        self._is_over = False
        self._num_sent = 0
        self._log: AccessEntry | None = None
        replicas.counts.begin()
        if replicas.logs_access:
            self._log = AccessEntry(
                "gRPC",
                "POST",
                route.head.path.decode("latin-1"),
                peer=peer_of(connection.transport),
                num_bytes_in=0,
                trace_parent=dict(route.head.fields).get(b"traceparent", b"").decode("latin-1"),
            )

    def _passage_of(self, head: RequestHead) -> CallPassage:
        memo = head.memo
        if not isinstance(memo, CallPassage):
            memo = CallPassage(head, peer_of(self.connection.transport))
            head.keep(memo)
        return memo

    # The request, as the client's connection brings it.

    def relay(self, data: bytes) -> None:
        self._num_kept = len(data)
        self._kept.append(data)
        if not self._session:
            self._session = sequence_of_message(data)
        self._send_first()

    def receive(self, data: memoryview) -> None:
        piece = data.tobytes()
        if not self._num_kept:
            self.relay(piece)
        else:
            self._num_kept += len(piece)
            if self._is_kept:
                self._kept.append(piece)
            if self._call is not None:
                self._call.send(piece, is_whole=False)
        self._mind_kept()
        self._credit += len(piece)
        self._widen()

    def filled(self, num_bytes: int) -> None:
        """It has no room."""

    def end(self) -> None:
        if not self._num_kept:
            self._send_first()
        elif self._call is not None and not self._call.is_whole:
            self._call.send(b"", is_whole=True)

    def _send_first(self) -> None:
        if self._passage.num_hops >= MAX_HOPS:
            text = f"the call has passed {self._passage.num_hops} routers: do they send requests to one another?"
            self._fail(Status.INTERNAL, text)
        else:
            self.choose()

    def _mind_kept(self) -> None:
        if self._is_kept and self._num_kept > _MAX_KEPT_BYTES and self._call is not None:
            self._is_kept = False
            self._kept = []

    def _widen(self) -> None:
        """Let the client send more, as the replica takes it."""
        if self.is_ended or self._is_over or self._credit < self.connection.initial_window // 4:
            return
        call = self._call
        if call is None:
            if self._num_kept > _MAX_KEPT_BYTES:
                return
        elif call.outgoing is not None and call.outgoing.num_bytes > _MAX_UNSENT_BYTES:
            _when_room(call.outgoing, self._widen)
            return
        increment, self._credit = self._credit, 0
        self.receive_window += increment
        self.connection.sender.frames.append(window_update(self.id, increment))
        self.connection.schedule_flush()

    # To a replica.

    def choose(self) -> None:
        """Send the call to the next replica, or end it where there is none."""
        replicas = self._replicas
        try:
            endpoint = replicas.choose(self._session, None, self._tried)
        except UnavailableError as error:
            if not (self._is_kept and replicas.wait(self)):
                self.unserved(error)
            return
        if not self._tried:
            replicas.endpoints.retry_budget.deposit()
        self._tried = (*self._tried, endpoint)
        self._endpoint = endpoint
        self._start_ns = time.monotonic_ns()
        replicas.endpoints.begin(endpoint)
        replicas.replica(endpoint).grpc.begin(self)

    def connected(self, connection: H2Connection) -> None:
        block, timeout_ns = self._passage.block, self.route.timeout_ns
        if timeout_ns is not None:
            block += timeout_field(timeout_ns)
        kept = self._kept
        data = kept[0] if len(kept) == 1 else b"".join(kept)
        self._call = connection.open(self, data, block=block, is_whole=self.is_ended)
        self._mind_kept()
        self._widen()

    def unreachable(self, reason: str) -> None:
        self._finish(Outcome.CONNECT_FAILED, reason)
        self._again()

    def _again(self) -> None:
        self._replicas.counts.num_retries += 1
        self.choose()

    def _finish(self, outcome: Outcome, problem: str = "") -> None:
        """The attempt is over."""
        endpoint, self._endpoint, self._call = self._endpoint, None, None
        if endpoint is not None:
            self._replicas.endpoints.finish(endpoint, outcome, start_ns=self._start_ns, problem=problem)

    # The answer.

    def begun(self, head: AnswerBlock) -> None:
        if self._has_begun or self._is_over:
            return
        self._has_begun = True
        self._kept, self._is_kept = [], False
        self.connection.sender.send_block(self.id, head.block)
        self.connection.schedule_flush()

    def more(self, data: bytes) -> None:
        connection = self.connection
        self._num_sent += len(data)
        if not connection.sender.send_data(self, (data,)):
            connection.queue(self, (data,))
        connection.schedule_flush()
        self._return_window()

    def _return_window(self) -> None:
        """Let the replica send more, as the client takes it."""
        call, outgoing = self._call, self.outgoing
        if call is None:
            return
        if outgoing is not None and outgoing.num_bytes > _MAX_UNSENT_BYTES:
            _when_room(outgoing, self._return_window)
        else:
            call.widen()

    def ended(self, trailers: AnswerBlock | None) -> None:
        status = None if trailers is None else trailers.grpc_status
        if status is None or trailers is None:
            self._finish(Outcome.SERVER_ERROR, "an answer without a status")
            self._fail(Status.UNKNOWN, "the replica ended the call without a status")
            return
        if status == Status.UNAVAILABLE and not self._has_begun and self._tries_elsewhere():
            return
        if status in _SERVER_FAULTS:
            self._finish(Outcome.SERVER_ERROR, f"gRPC status {status}")
        else:
            is_well = status == Status.OK
            self._finish(Outcome.DONE if is_well else Outcome.CLIENT_ERROR)
        self._end(status)
        connection = self.connection
        if self.phase != RUNNING:
            return
        self.phase = ANSWERED
        if self.outgoing is None:
            connection.sender.send_block(self.id, trailers.block, END_STREAM)
            connection.finish(self)
        else:
            connection.queue(self, (), trailers.block)
        connection.schedule_flush()

    def _tries_elsewhere(self) -> bool:
        """Whether the replica has refused the call, and another one may take it."""
        replicas = self._replicas
        if not (self._is_kept and self.is_ended and replicas.has_other(self._tried)):
            return False
        if not replicas.endpoints.retry_budget.take():
            return False
        self._finish(Outcome.OVERLOADED, "UNAVAILABLE")
        self._again()
        return True

    def lost(self, reason: str, code: int | None, *, is_refused: bool) -> None:
        self._finish(Outcome.LOST if code is None else Outcome.SERVER_ERROR, reason)
        counts = self._replicas.counts
        if self._has_begun:
            counts.num_broken_streams += 1
            self._fail(Status.UNAVAILABLE, f"the replica was lost while it answered: {reason}")
        elif is_refused and self._is_kept:
            self._again()
        else:
            counts.num_lost += 1
            self._fail(
                Status.UNAVAILABLE,
                f"the replica was lost while it had the request, which may have been processed: {reason}",
            )

    def unserved(self, error: ServerError) -> None:
        self._replicas.counts.num_unserved += 1
        retry_ms = 0 if error.retry_after_s is None else int(error.retry_after_s * 1000)
        self._fail(Status.UNAVAILABLE, error.message, retry_ms)

    def _fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        self._end(status)
        if self.phase == RUNNING:
            self.phase = ANSWERED
            end_call(self, status, text, has_headers=self._has_begun, retry_ms=retry_ms)

    def _end(self, status: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._kept, self._is_kept = [], False
        self._replicas.counts.end()
        if self._log is not None:
            self._log.num_bytes_in = self.num_received
            self._log.write(_NAMES.get(status, str(status)), self._num_sent)

    # Ends that are not answers, as the client's connection has them.

    def tell_short(self) -> None:
        """It takes no memory of the budget."""

    def cancel(self) -> None:
        call, endpoint = self._call, self._endpoint
        self._replicas.stop_waiting(self)
        if call is not None:
            call.reset()
        elif endpoint is not None:
            self._replicas.replica(endpoint).grpc.stop_waiting(self)
        self._finish(Outcome.ABANDONED)
        self._end(Status.CANCELLED)
        self.connection.settle_abandoned()

    def give_up(self, text: str) -> None:
        self._fail(Status.DEADLINE_EXCEEDED, text)

    def dismiss(self, text: str) -> None:
        if self.phase != RUNNING:
            return
        call = self._call
        if call is not None:
            call.reset()
        self._finish(Outcome.ABANDONED)
        if self._has_begun:
            self._end(Status.UNAVAILABLE)
            self.phase = ANSWERED
            self.connection.reset(self, ErrorCode.INTERNAL_ERROR)
        else:
            self._fail(Status.UNAVAILABLE, text)


def _when_room(outgoing: Outgoing, call: Callable[[], None]) -> None:
    """Call when most of what waits is sent, or nothing more will be."""
    if outgoing.room is None:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outgoing.room = room
        room.add_done_callback(lambda _: call())
