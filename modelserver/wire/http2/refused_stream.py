"""A request that reaches no handler: only its answer remains to be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelserver.wire.http2.frame import END_STREAM
from modelserver.wire.http2.stream import ANSWERED, STREAM_SLOTS, Http2Stream

if TYPE_CHECKING:
    from modelserver.wire.http2.connection import Http2Connection
    from modelserver.wire.http2.outgoing import Outgoing
    from modelserver.wire.http2.route import Refusal


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
