"""One HTTP/2 connection on asyncio: REST exchanges and gRPC calls, answered from their callbacks (RFC 9113)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from modelserver.telemetry.wire_counts import Protocol
from modelserver.wire.busy_poll import GRPC_WOKEN_NS
from modelserver.wire.context import DISMISSAL, WireContext
from modelserver.wire.http2.closing import Closing
from modelserver.wire.http2.control import ControlFrames
from modelserver.wire.http2.frame import ConnectionFault, goaway
from modelserver.wire.http2.receiver import Receiver
from modelserver.wire.http2.sender import Sender
from modelserver.wire.http2.stream import Connection
from modelserver.wire.http2.timeouts import Timeouts
from modelserver.wire.sockets.transport import receive_soon_of


class Http2Connection(Connection, asyncio.BufferedProtocol):
    """From the first byte to the close. Everything is called on the event loop thread.

    Its transport and its port call it. `receiver` and `control` handle input, `sender` holds output, `closing` and
    `timeouts` end the connection. While it reads, a connection collects its answers and sends
    them after reading; otherwise it sends at the end of the loop's turn.
    """

    __slots__ = ("_is_reading", "_receive_soon", "closing", "control", "is_lost", "receiver", "timeouts")

    def __init__(self, context: WireContext) -> None:
        super().__init__(context)
        self.closing = Closing(self)
        self.control = ControlFrames(self, self.closing)
        self.receiver = Receiver(self, self.control)
        self.is_lost = False
        self._is_reading = True

    def begin(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over a transport from which `data` was already read. Called once, in place of connection_made."""
        context = self.context
        self.transport = transport
        self.sender = Sender(transport, context.limits.write_buffer_bytes)
        self._receive_soon = receive_soon_of(transport)
        self.timeouts = Timeouts(self, self.receiver, self.closing, context.loop.time())
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
        try:
            self.timeouts.sweep(now_s)
        except ConnectionFault as fault:
            self.fail(fault)
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

    def flush(self) -> None:
        """Send the collected data in one write."""
        self.is_flush_due = False
        sender = self.sender
        if sender.flush():
            self.schedule_flush()
        if sender.finished:
            self.finish_sent()
        if not (sender.is_paused or self.receiver.has_backlog):
            self.abuse_limits.forget_answers()
        if len(self.streams) != self._num_counted or not self.max_open:
            self.count_streams()
        if self.closing.is_due and not self.streams and not sender.has_ready:
            self._hang_up(then=self.transport.close)

    # Violations of the peer.

    def fail(self, fault: ConnectionFault) -> None:
        """Tell the peer what it did wrong, and hang up."""
        if self.is_lost or self.closing.has_hung_up:
            return
        self.count(fault.violation)
        self.sender.frames.append(goaway(self.last_stream_id, fault.code, fault.text))
        self._hang_up(then=self.abort)

    def _hang_up(self, *, then: Callable[[], None]) -> None:
        """Read nothing more, and close by `then` unless the client does so soon."""
        self.receiver.discard()
        self.closing.hang_up(then=then)
