"""The base of all streams, of either protocol (RFC 9113, 5), and the stream of a request that no handler gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from modelserver.wire.http2.frame import END_STREAM, protocol_fault

if TYPE_CHECKING:
    from modelserver.wire.http2.connection import Http2Connection
    from modelserver.wire.http2.routes import Refusal, Route
    from modelserver.wire.http2.sender import Outgoing

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


class Http2Stream:
    """One stream from its HEADERS to its end. Subclasses are the calls and exchanges that handlers see.

    `is_ended` says that the client has sent everything. `num_received` are bytes of DATA without padding. The windows
    are the bytes that each side may still send. Subclasses with bodies to receive or handlers to stop override the
    methods that raise NotImplementedError here; a refused stream has neither.
    """

    if not TYPE_CHECKING:  # mypy would take these for the only slots
        __slots__ = ()

    connection: Http2Connection
    id: int
    route: Route
    phase: int
    is_ended: bool
    num_received: int
    send_window: int
    receive_window: int
    outgoing: Outgoing | None

    def receive(self, data: memoryview) -> None:
        """A piece of the body, which is valid during this call only."""
        raise NotImplementedError

    def room(self) -> memoryview | None:
        """Memory into which the next bytes of the body may be received directly, if there is any."""
        return None

    def filled(self, num_bytes: int) -> None:
        """This many bytes were received into `room`."""
        raise NotImplementedError

    def end(self) -> None:
        """The client has sent everything."""
        raise NotImplementedError

    def give_up_soon(self) -> None:
        """The budget of large requests has taken the memory of this one; another may be at work now."""
        self.connection.context.loop.call_soon(self.tell_short)

    def tell_short(self) -> None:
        """Tell the client that the server lacks the memory for its request, unless the stream has ended meanwhile."""
        raise NotImplementedError

    def cancel(self) -> None:
        """The answer is no longer wanted: stop the running handler. The stream is closed already."""
        raise NotImplementedError

    def give_up(self, text: str) -> None:
        """The client stopped sending: answer with an error, and close the stream."""
        raise NotImplementedError

    def dismiss(self, text: str) -> None:
        """Give up the handler: tell the client so if its answer has not begun, and stop it."""
        raise NotImplementedError

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


class RefusedStream(Http2Stream):
    """Sends a refusal, and ignores the request's body."""

    __slots__ = tuple(slot for slot in STREAM_SLOTS if slot != "route")

    def __init__(self, connection: Http2Connection, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.phase = ANSWERED
        self.is_ended = False
        self.num_received = 0
        self.send_window = connection.sender.initial_window
        self.receive_window = connection.initial_window
        self.outgoing: Outgoing | None = None

    def answer(self, refusal: Refusal) -> None:
        """Send it; the stream closes as soon as all of it is sent."""
        connection = self.connection
        if refusal.body:
            connection.sender.send_block(self.id, refusal.block)
            connection.sender.queue(self, refusal.body, b"")
        else:
            connection.sender.send_block(self.id, refusal.block, END_STREAM)
            connection.finish(self)

    def answer_late(self, refusal: Refusal) -> None:
        """As `answer`, unless the client has left."""
        connection = self.connection
        if connection.streams.get(self.id) is self and not connection.transport.is_closing():
            self.answer(refusal)
            connection.schedule_flush()

    def receive(self, data: memoryview) -> None:
        """Dropped."""

    def end(self) -> None:
        """Ignored."""

    def give_up(self, text: str) -> None:
        """It has its answer."""

    def dismiss(self, text: str) -> None:
        """It has its answer."""

    def check_length(self, *, is_complete: bool) -> None:
        """Ignored."""
