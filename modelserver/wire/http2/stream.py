"""The streams of a connection, of either protocol (RFC 9113, 5), and the connection as they see it."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from modelserver.auth.access import EVERYBODY, Admitted
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import CheckHead
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.address import peer_of
from modelserver.wire.assembly import owner_of
from modelserver.wire.context import Flushable, WireContext
from modelserver.wire.http2.abuse_limits import AbuseLimits, Closed, ClosedStreams, UnendedStreams
from modelserver.wire.http2.frame import MAX_31_BITS, ErrorCode, protocol_fault, rst_stream
from modelserver.wire.http2.head import RequestHead
from modelserver.wire.http2.message import MessageAssembly
from modelserver.wire.http2.sender import Sender, SendingStream

# Phases of a stream; plain numbers, because the frame loop compares them for every request.
FRESH: Final = 0  # the head arrived, and nothing of the body
RECEIVING: Final = 1
RUNNING: Final = 2  # a handler has the request
ANSWERED: Final = 3  # its answer waits to be sent
DONE: Final = 4
ABANDONED: Final = 5  # closed, while the handler still works

# The attributes of `Http2Stream`, for the `__slots__` of its subclasses: those extend the slotted calls and exchanges
# of the frontends too, and only one base may bring slots of its own.
STREAM_SLOTS: Final = (
    "connection",
    "id",
    "is_ended",
    "num_received",
    "outgoing",
    "phase",
    "receive_window",
    "route",
    "send_window",
)


class Refusal:
    """An answer that needs no handler: a header block, and a body for clients of HTTP.

    `is_of_caller`: the frontend does not admit this caller.
    """

    __slots__ = ("block", "body", "is_of_caller")

    def __init__(self, block: bytes, body: Sequence[Buffer] = (), *, is_of_caller: bool = False) -> None:
        self.block = block
        self.body = body
        self.is_of_caller = is_of_caller


class Route:
    """The data derived from a head, for all requests with that head. Never changed.

    `open` makes the stream, and `handle` is the handler, which gets the stream or its call. A head that leads to no
    handler has a `Refusal` instead. `encoding` compresses answers, unless it is None. `admitted` is the frontend's
    decision on the head; `check_head` says for a gRPC call whether it still holds.
    """

    __slots__ = ("admitted", "check_head", "content_length", "encoding", "handle", "head", "open", "timeout_ns")

    def __init__(
        self,
        head: RequestHead,
        open_stream: Callable[[Connection, int, Route], Http2Stream],
        handle: Callable[[Any], Any],
        encoding: bytes | None = None,
        admitted: Admitted = EVERYBODY,
        check_head: CheckHead | None = None,
    ) -> None:
        self.head = head
        self.open = open_stream
        self.handle = handle
        self.encoding = encoding
        self.admitted = admitted
        self.check_head = check_head
        # Copied: these are read for each request.
        self.content_length = head.content_length
        self.timeout_ns = head.timeout_ns


class Http2Stream(SendingStream, abc.ABC):
    """One stream from its HEADERS to its end. Subclasses are the calls and exchanges that handlers see.

    `is_ended` says that the client has sent everything. `num_received` are bytes of DATA without padding. The windows
    are the bytes that each side may still send.
    """

    if not TYPE_CHECKING:  # mypy would take these for the only slots
        __slots__ = ()

    connection: Connection
    route: Route
    phase: int
    is_ended: bool
    num_received: int
    receive_window: int

    # Whether a body that comes in one frame is given to `relay`.
    relays: ClassVar[bool] = False

    @abc.abstractmethod
    def receive(self, data: memoryview) -> None:
        """A piece of the body, which is valid during this call only."""

    def relay(self, data: bytes) -> None:
        """The whole body: the client has sent everything. In place of `receive` and `end`."""

    def room(self) -> memoryview | None:
        """Memory into which the next bytes of the body may be received directly, if there is any."""
        return None

    @abc.abstractmethod
    def filled(self, num_bytes: int) -> None:
        """This many bytes were received into `room`."""

    @abc.abstractmethod
    def end(self) -> None:
        """The client has sent everything."""

    def give_up_soon(self) -> None:
        """The budget of large requests has taken the memory of this one; another may be at work now."""
        self.connection.context.loop.call_soon(self.tell_short)

    @abc.abstractmethod
    def tell_short(self) -> None:
        """Tell the client that the server lacks the memory for its request, unless the stream has ended meanwhile."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """The answer is no longer wanted: stop the running handler. The stream is closed already."""

    @abc.abstractmethod
    def give_up(self, text: str) -> None:
        """The client stopped sending: answer with an error, and close the stream."""

    @abc.abstractmethod
    def dismiss(self, text: str) -> None:
        """Give up the handler: tell the client so if its answer has not begun, and stop it."""

    def release(self) -> None:
        """The stream is closed: release its resources. Called once."""

    @property
    def is_open(self) -> bool:
        """Whether data may still be sent on the stream."""
        return self.phase < DONE

    @property
    def is_within_message(self) -> bool:
        """Whether the body or message received last continues."""
        return True

    @property
    def awaits_body(self) -> bool:
        """Whether the client is expected to send more now, for the request or a message that has begun."""
        return not self.is_ended and self.phase <= RECEIVING

    def check_length(self, *, is_complete: bool) -> None:
        """Raises ConnectionFault when the body differs from the announced content-length (RFC 9113, 8.1.1)."""
        length = self.route.content_length
        if length is not None and (self.num_received != length if is_complete else self.num_received > length):
            raise protocol_fault(
                f"stream {self.id} announced a content-length of {length} and brought {self.num_received} bytes"
            )


class Connection(Flushable):
    """A connection as its streams and its halves see it: what they share, and how streams open and end.

    `transport` and `sender` exist once it has begun.
    """

    __slots__ = (
        "_num_abandoned",
        "_num_counted",
        "abuse_limits",
        "closed",
        "context",
        "has_heard",
        "initial_window",
        "is_flush_due",
        "last_admissible_id",
        "last_stream_id",
        "max_open",
        "num_opened",
        "num_unacknowledged",
        "sender",
        "streams",
        "transport",
        "unended",
    )

    transport: asyncio.Transport
    sender: Sender

    def __init__(self, context: WireContext) -> None:
        limits = context.limits
        self.context = context
        self.streams: dict[int, Http2Stream] = {}
        self.closed = ClosedStreams()
        self.unended = UnendedStreams(context.loop, limits.times.linger_s, self._ask_to_stop)
        self.abuse_limits = AbuseLimits(limits)
        # The initial receive window of each stream.
        self.initial_window = limits.http2.initial_window_bytes
        self.num_opened = 0
        self.last_stream_id = 0
        # Streams above it are ignored: set when the connection is about to close.
        self.last_admissible_id = MAX_31_BITS
        # How many streams may be open now; calls whose client has left count until their handlers are done.
        self.max_open = limits.http2.max_concurrent_streams
        # SETTINGS of ours that the peer has not acknowledged.
        self.num_unacknowledged = 1
        self.is_flush_due = False
        # Whether the peer has sent anything since the last sweep.
        self.has_heard = False
        self._num_abandoned = 0
        # Open streams as the metrics have counted them.
        self._num_counted = 0

    def schedule_flush(self) -> None:
        """There is data to send; it leaves at the end of this turn of the loop."""
        if not self.is_flush_due:
            self.is_flush_due = True
            self.context.outbox.add(self)

    def count(self, violation: Violation) -> None:
        """A limit ended a request."""
        self.context.counts.violated(Protocol.HTTP2, violation)

    def new_assembly(self, admitted: Admitted) -> MessageAssembly:
        """An assembly for messages of a call whose head was admitted this way."""
        max_bytes = self.context.limits.max_message_bytes
        if admitted.max_body_bytes is not None:
            max_bytes = min(max_bytes, admitted.max_body_bytes)
        return MessageAssembly(self.context.assembly, max_bytes, owner_of(admitted.caller, peer_of(self.transport)))

    def is_idle(self, stream_id: int) -> bool:
        """Whether frames on the stream are wrong because it was never opened. After a GOAWAY this is unknown."""
        return not stream_id or self.last_stream_id < stream_id <= self.last_admissible_id

    def admits(self, stream_id: int) -> bool:
        """Whether the stream may open; one that may not is refused, or ignored after a GOAWAY."""
        if stream_id > self.last_admissible_id:
            return False
        self.last_stream_id = stream_id
        if len(self.streams) < self.max_open:
            return True
        self.count(Violation.TOO_MANY_STREAMS)
        # A client that does not know our limit yet is not at fault.
        self.refuse(stream_id, ErrorCode.REFUSED_STREAM, is_counted=not self.num_unacknowledged)
        return False

    def refuse(self, stream_id: int, code: ErrorCode, *, is_counted: bool = True) -> None:
        """Reset a stream that was never opened. Raises ConnectionFault when that happens too often."""
        self.sender.frames.append(rst_stream(stream_id, code))
        self.closed.add(stream_id, Closed.RESET_BY_US)
        if is_counted:
            self.abuse_limits.count_reset()

    def end_of(self, stream: Http2Stream) -> None:
        """The client has ended its side. Raises ConnectionFault when it announced another length."""
        stream.is_ended = True
        stream.check_length(is_complete=True)
        stream.end()

    def finish(self, stream: Http2Stream) -> None:
        """Our side has ended: the last frame of the answer is among those to be sent."""
        if stream.is_ended:
            self._close(stream, Closed.ENDED)
        else:
            self._close(stream, Closed.RESET_BY_US)
            self.unended.add(stream.id)

    def finish_sent(self) -> None:
        """Finish the streams whose answers the sender has framed to their end."""
        finished, self.sender.finished = self.sender.finished, []
        for stream_id in finished:
            self.finish(self.streams[stream_id])

    def queue(self, stream: Http2Stream, parts: Sequence[Buffer], ending: bytes | None = None) -> None:
        """Send the parts as the windows allow, and then `ending`, which may be given once."""
        self.sender.queue(stream, parts, ending)
        if self.sender.num_queued_bytes > self.context.limits.max_queued_bytes:
            self.update_max_open()

    def drop(self, stream: Http2Stream) -> None:
        """Forget what waits to be sent on a stream."""
        self.context.num_given_up_bytes += self.sender.drop(stream)

    def _ask_to_stop(self, stream_id: int) -> None:
        """The client should send no more on a stream that our side has ended."""
        self.sender.frames.append(rst_stream(stream_id, ErrorCode.NO_ERROR))
        self.schedule_flush()

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        """Give a stream up."""
        self.sender.frames.append(rst_stream(stream.id, code))
        self._leave(stream, Closed.RESET_BY_US)
        self.schedule_flush()

    def reset_by_peer(self, stream: Http2Stream) -> None:
        """The client has cancelled. Raises ConnectionFault when it does that too often."""
        self._leave(stream, Closed.RESET_BY_PEER)
        self.abuse_limits.count_reset()

    def leave_streams(self) -> None:
        """The client is gone: nothing more is sent on any stream."""
        for stream in list(self.streams.values()):
            self._leave(stream, Closed.RESET_BY_PEER)
        self.unended.close()
        self.count_streams()

    def settle_abandoned(self) -> None:
        """The handler of an already closed stream is done."""
        self._num_abandoned -= 1
        self.update_max_open()

    def update_max_open(self) -> None:
        """The limit less the handlers of abandoned streams; no room while too much data waits to be sent."""
        limits = self.context.limits
        has_room = self.sender.num_queued_bytes <= limits.max_queued_bytes
        self.max_open = limits.http2.max_concurrent_streams - self._num_abandoned if has_room else 0

    def _leave(self, stream: Http2Stream, how: Closed) -> None:
        was_running = stream.phase == RUNNING
        self._close(stream, how)
        if was_running:
            stream.cancel()

    def _close(self, stream: Http2Stream, how: Closed) -> None:
        del self.streams[stream.id]
        self.closed.add(stream.id, how)
        if stream.phase == RUNNING:
            stream.phase = ABANDONED
            self._num_abandoned += 1
        else:
            stream.phase = DONE
        self.drop(stream)
        stream.release()

    def count_streams(self) -> None:
        """Bring the metrics and the limit up to date."""
        num_open = len(self.streams)
        self.context.counts.open_streams += num_open - self._num_counted
        self._num_counted = num_open
        self.update_max_open()
