"""One HTTP/2 connection on asyncio: REST exchanges and gRPC calls, answered from their callbacks (RFC 9113)."""

from __future__ import annotations

import asyncio

from modelserver.auth.access import Admitted
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.address import peer_of
from modelserver.wire.assembly import owner_of
from modelserver.wire.busy_poll import GRPC_WOKEN_NS
from modelserver.wire.context import DISMISSAL, Flushable, WireContext
from modelserver.wire.http2.abuse_limits import AbuseLimits, Closed, ClosedStreams
from modelserver.wire.http2.closing import Closing, UnendedStreams
from modelserver.wire.http2.control import ControlFrames
from modelserver.wire.http2.frame import MAX_31_BITS, ConnectionFault, ErrorCode, goaway, rst_stream
from modelserver.wire.http2.message import MessageAssembly
from modelserver.wire.http2.receiver import Receiver
from modelserver.wire.http2.sender import Sender
from modelserver.wire.http2.stream import ABANDONED, DONE, RUNNING, Http2Stream
from modelserver.wire.http2.timeouts import Timeouts
from modelserver.wire.sockets.transport import receive_soon_of


class Http2Connection(asyncio.BufferedProtocol, Flushable):
    """From the first byte to the close. Everything is called on the event loop thread.

    The halves and the streams of a connection share this object: `receiver` and `control` handle input, `sender` holds
    output, `closing` and `timeouts` end the connection. While it reads, a connection collects its answers and sends
    them after reading; otherwise it sends at the end of the loop's turn.
    """

    __slots__ = (
        "_is_reading",
        "_num_abandoned",
        "_num_counted",
        "_receive_soon",
        "abuse_limits",
        "closed",
        "closing",
        "context",
        "control",
        "has_heard",
        "initial_window",
        "is_flush_due",
        "is_lost",
        "last_admissible_id",
        "last_stream_id",
        "max_open",
        "num_opened",
        "receiver",
        "sender",
        "streams",
        "timeouts",
        "transport",
        "unended",
    )

    def __init__(self, context: WireContext) -> None:
        limits = context.limits
        self.context = context
        self.streams: dict[int, Http2Stream] = {}
        self.closed = ClosedStreams()
        self.unended = UnendedStreams(self)
        self.control = ControlFrames(self)
        self.abuse_limits = AbuseLimits(limits)
        # The initial receive window of each stream.
        self.initial_window = limits.http2.initial_window_bytes
        self.num_opened = 0
        self.last_stream_id = 0
        # Streams above it are ignored: set when the connection is about to close.
        self.last_admissible_id = MAX_31_BITS
        # How many streams may be open now; calls whose client has left count until their handlers are done.
        self.max_open = limits.http2.max_concurrent_streams
        self.is_flush_due = False
        self.is_lost = False
        self.has_heard = False
        self.receiver = Receiver(self)
        self._num_abandoned = 0
        # Open streams as the metrics have counted them.
        self._num_counted = 0
        self._is_reading = True

    def begin(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over a transport from which `data` was already read. Called once, in place of connection_made."""
        context = self.context
        self.transport: asyncio.Transport = transport
        self.sender = Sender(self, transport)
        self._receive_soon = receive_soon_of(transport)
        self.closing = Closing(self)
        self.timeouts = Timeouts(self, context.loop.time())
        context.connections.add(self)
        context.counts.opened(Protocol.HTTP2)
        transport.set_write_buffer_limits(high=context.limits.write_buffer_bytes)
        self.sender.frames.append(context.http2_announcement)
        if data:
            self._read_first(data)
        else:
            self.schedule_flush()  # not at once: the preface, which is on its way, is acknowledged in the same write
        if context.is_draining:
            self.shutdown()

    def _read_first(self, data: bytes) -> None:
        self.has_heard = self.is_flush_due = True
        try:
            self.receiver.feed(data)
        except ConnectionFault as fault:
            self.fail(fault)
        else:
            self._after_reading()

    # Called by the transport.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the arena has one size
        return self.receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self.closing.has_hung_up:
            self.closing.count_discarded(nbytes)
        self.has_heard = True
        self.is_flush_due = True  # which keeps answers from flushing: that is done here, once
        try:
            self.receiver.received(nbytes)
        except ConnectionFault as fault:
            self.fail(fault)
        else:
            self._after_reading()
            if not self.streams:
                self.context.busy_poll.expect(GRPC_WOKEN_NS, self._receive_soon)

    def eof_received(self) -> None:
        """A client that has finished sending has left: the transport closes."""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason makes no difference
        self.is_lost = True
        self.context.connections.discard(self)
        self.context.counts.closed(Protocol.HTTP2)
        self.closing.cancel_timers()
        self.leave_streams()
        self.receiver.discard()

    def pause_writing(self) -> None:
        self.sender.set_paused(True)

    def resume_writing(self) -> None:
        self.sender.set_paused(False)
        self._set_reading()
        self.schedule_flush()

    # Called by the port.

    def sweep(self, now_s: float) -> None:
        self.timeouts.sweep(now_s)
        if self.sender.frames:
            self.flush()

    def retire(self) -> None:
        """Does nothing: HTTP/2 can say so without an answer, in `shutdown`, when the port takes no more connections."""

    def shutdown(self) -> None:
        self.closing.announce()

    def dismiss(self) -> None:
        self.closing.refuse()
        for stream in list(self.streams.values()):
            stream.dismiss(DISMISSAL)
        self.flush()

    def abort(self) -> None:
        self.transport.abort()

    # Reading.

    def _after_reading(self) -> None:
        if self.receiver.has_backlog:
            self._set_reading()
            self.context.loop.call_soon(self._go_on)
        elif self.sender.is_paused:
            self._set_reading()
        self.flush()

    def _go_on(self) -> None:
        """Read the bytes left over from the last turn."""
        if not self.receiver.has_backlog:
            return
        self.is_flush_due = True
        try:
            self.receiver.go_on()
        except ConnectionFault as fault:
            self.fail(fault)
            return
        self._set_reading()
        self._after_reading()

    def _set_reading(self) -> None:
        """Continue reading, unless there is enough to do, or the peer does not take its answers."""
        limit = self.context.limits.max_queued_bytes
        is_reading = not self.receiver.has_backlog and not self.sender.holds_more_than(limit)
        if is_reading == self._is_reading or self.transport.is_closing():
            return
        self._is_reading = is_reading
        if is_reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    # Sending.

    def schedule_flush(self) -> None:
        """There is data to send; it leaves at the end of this turn of the loop."""
        if not self.is_flush_due:
            self.is_flush_due = True
            self.context.outbox.add(self)

    def flush(self) -> None:
        """Send the collected data in one write."""
        self.is_flush_due = False
        sender = self.sender
        if sender.flush():
            self.schedule_flush()
        if not (sender.is_paused or self.receiver.has_backlog):
            self.abuse_limits.forget_answers()
        if len(self.streams) != self._num_counted or not self.max_open:
            self._count_streams()
        if self.closing.is_due:
            self.closing.close_if_done()

    def _count_streams(self) -> None:
        num_open = len(self.streams)
        self.context.counts.open_streams += num_open - self._num_counted
        self._num_counted = num_open
        self.update_max_open()

    # Streams.

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
        self.refuse(stream_id, ErrorCode.REFUSED_STREAM, is_counted=not self.control.num_unacknowledged)
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
        self._count_streams()

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
        self.sender.drop(stream)
        stream.release()

    # Violations of the peer.

    def count(self, violation: Violation) -> None:
        """A limit ended a request."""
        self.context.counts.violated(Protocol.HTTP2, violation)

    def fail(self, fault: ConnectionFault) -> None:
        """Tell the peer what it did wrong, and hang up."""
        if self.is_lost or self.closing.has_hung_up:
            return
        self.count(fault.violation)
        self.sender.frames.append(goaway(self.last_stream_id, fault.code, fault.text))
        self.closing.hang_up(then=self.abort)
