"""An HTTP request on a stream: the stream is the exchange that the handler answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from modelserver.core.tensor import Buffer
from modelserver.errors import PayloadTooLargeError, ServerError
from modelserver.protocol.exchange import HttpExchange, ResponseWriter
from modelserver.protocol.response import ErrorWriter, HttpResponse, body_refused
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.address import peer_of
from modelserver.wire.assembly import owner_of
from modelserver.wire.body import MIN_DIRECT_BYTES, BodyCollector
from modelserver.wire.http1.head import BODYLESS, field_value, json_length
from modelserver.wire.http2.frame import END_STREAM, ErrorCode, window_update
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.sender import Outgoing
from modelserver.wire.http2.stream import (
    ABANDONED,
    ANSWERED,
    DONE,
    RECEIVING,
    RUNNING,
    STREAM_SLOTS,
    Connection,
    Http2Stream,
    Route,
)

# Statuses of the static table (RFC 7541, appendix A).
_STATUS_FIELDS: Final = {
    200: b"\x88",
    204: b"\x89",
    206: b"\x8a",
    304: b"\x8b",
    400: b"\x8c",
    404: b"\x8d",
    500: b"\x8e",
}
# Fields of HTTP/1.1 connections, which must not come over HTTP/2, and the length, which is ours to say.
_UNSENT_FIELDS: Final = frozenset(
    {"connection", "content-length", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}
)


@lru_cache(maxsize=512)
def answer_block(status: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    """The block without the content-length. Most answers repeat theirs."""
    block = _STATUS_FIELDS.get(status) or literal(b":status", b"%d" % status)
    for name, value in headers:
        if (lower := name.lower()) not in _UNSENT_FIELDS:
            block += literal(lower.encode("latin-1"), field_value(value).encode("latin-1"))
    return block


def length_field(num_bytes: int) -> bytes:
    return literal(b"content-length", b"%d" % num_bytes)


_logger = logging.getLogger(__name__)

# Bytes waiting to be sent beyond which a writer waits.
_MAX_UNSENT_BYTES: Final = 64 * 1024


class RestExchange(HttpExchange, Http2Stream):
    """One HTTP request from its HEADERS to the end of its answer; also the writer of an answer in pieces.

    A body over the limit is answered at once, and the rest of it is ignored.
    """

    __slots__ = (*STREAM_SLOTS, "_collector", "_credit", "_is_started")

    def __init__(self, connection: Connection, stream_id: int, route: Route) -> None:
        self.connection = connection
        self.id = stream_id
        self.route = route
        self.phase = RECEIVING
        self.is_ended = False
        self.num_received = 0
        self.send_window = connection.sender.initial_window
        self.receive_window = connection.initial_window
        self.outgoing: Outgoing | None = None
        self.head = route.head.http
        self.on_disconnect = None
        self._collector: BodyCollector | None = None
        # Bytes received and not yet returned to the window.
        self._credit = 0
        # Whether the answer is being written in pieces.
        self._is_started = False

    # The request.

    @property
    def peer(self) -> str:
        return peer_of(self.connection.transport)

    def receive(self, data: memoryview) -> None:
        if self._collector is None and self._is_refused():
            return
        collector = self._collect()
        if self.phase != RECEIVING:
            return  # it was answered before it was complete
        collector.add(data.tobytes() if self.route.content_length is None else data)
        if collector.error is not None:
            self._refuse(collector.error)
        else:
            self._widen(len(data), collector)

    def room(self) -> memoryview | None:
        collector = self._collector
        return collector.room() if self.phase == RECEIVING and collector is not None else None

    def filled(self, num_bytes: int) -> None:
        collector = self._collect()
        collector.filled(num_bytes)
        if collector.error is not None:
            self._refuse(collector.error)

    def end(self) -> None:
        if self.phase > RECEIVING:
            return  # it was answered before it was complete
        if self._collector is None:
            self.body = b""
        else:
            self._collector.finish()
            self.body = self._collector.body()
        self.phase = RUNNING
        try:
            self.route.handle(self)
        except Exception as error:
            _logger.error("an HTTP handler failed", exc_info=error)
            text = f"internal error ({type(error).__name__}); see the server's log"
            self.respond(self._errors().refused(500, text))

    def _errors(self) -> ErrorWriter:
        http = self.connection.context.http
        assert http is not None, "a request came to it"
        return http.errors(self.head.path)

    def _collect(self) -> BodyCollector:
        collector = self._collector
        if collector is None:
            context = self.connection.context
            limit, admitted = context.limits.max_body_bytes, self.route.admitted
            if admitted.max_body_bytes is not None:
                limit = min(limit, admitted.max_body_bytes)
            header_length = json_length(self.head.headers)
            owner = owner_of(admitted.caller, self.peer)
            length = self.route.content_length
            pipe = None if admitted.open_body is None else admitted.open_body(length)
            collector = BodyCollector(length, header_length, limit, context.assembly, owner, pipe)
            collector.on_given_up = self.give_up_soon
            collector.on_room = self._widen_again
            self._collector = collector
            if collector.error is not None:
                self._refuse(collector.error)
        return collector

    def _is_refused(self) -> bool:
        """Whether a large body is refused after all: its head may have been remembered, and its key since revoked."""
        length, http = self.route.content_length, self.connection.context.http
        if self.phase != RECEIVING or http is None or (length is not None and length < MIN_DIRECT_BYTES):
            return False
        checked = http.check_head(self.head, self.peer)
        if not isinstance(checked, HttpResponse):
            return False
        self.phase = RUNNING
        self.respond(checked)
        return True

    def _refuse(self, error: ServerError) -> None:
        if not self._collect().is_piped:
            too_large = isinstance(error, PayloadTooLargeError)
            self.connection.count(Violation.BODY_TOO_LARGE if too_large else Violation.ASSEMBLY_BUDGET)
        self.phase = RUNNING
        self.respond(body_refused(error, self._errors()))

    def _widen(self, num_received: int, collector: BodyCollector) -> None:
        """Widen the window for the rest of a body of known length; for any other, by the bytes that were taken."""
        if self.is_ended:
            return
        length = self.route.content_length
        if length is not None and not collector.is_piped:
            increment = length - self.num_received - self.receive_window
        else:
            self._credit += num_received
            is_due = self._credit >= self.connection.initial_window // 4 and collector.has_room
            increment = self._credit if is_due else 0
        if increment > 0:
            self._credit = 0
            self.receive_window += increment
            self.connection.sender.frames.append(window_update(self.id, increment))

    def _widen_again(self) -> None:
        if self.phase == RECEIVING and self._collector is not None:
            self._widen(0, self._collector)
            self.connection.schedule_flush()

    # The answer.

    def respond(self, response: HttpResponse) -> None:
        if self.phase != RUNNING:
            self._come_late()
            return
        body: Sequence[Buffer] = response.body
        block = answer_block(response.status, tuple(response.headers))
        if response.status not in BODYLESS:
            block += length_field(sum(map(len, body)))
        if response.status in BODYLESS or self.head.method == "HEAD":
            body = ()
        self._begin(block, ends=not any(body))
        if any(body):
            self.connection.queue(self, body, b"")

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        if self.phase == RUNNING:
            self._is_started = True
            if self.head.method == "HEAD":
                self._begin(answer_block(status, tuple(headers)), ends=True)
            else:
                self.connection.sender.send_block(self.id, answer_block(status, tuple(headers)))
                self.connection.schedule_flush()
        else:
            self._come_late()
        return self

    def send(self, data: Buffer) -> bool:
        """Send a piece; whether there is room for more. Raises ConnectionResetError when the client has left."""
        if self.head.method == "HEAD":
            return True
        self._check_open()
        if data:
            self.connection.queue(self, (data,))
            self.connection.schedule_flush()
        outgoing = self.outgoing
        return outgoing is None or outgoing.num_bytes <= _MAX_UNSENT_BYTES

    async def wait_for_room(self) -> None:
        """Wait until there is room for more. Raises ConnectionResetError when the client has left."""
        outgoing = self.outgoing
        if outgoing is not None and outgoing.num_bytes > _MAX_UNSENT_BYTES:
            outgoing.room = self.connection.context.loop.create_future()
            await outgoing.room
        self._check_open()

    async def write(self, data: Buffer) -> None:
        """Send a piece; returns when there is room for more. Raises ConnectionResetError when the client has left."""
        if not self.send(data):
            await self.wait_for_room()

    async def close(self) -> None:
        """End an answer in pieces."""
        if self.phase == RUNNING:
            self.phase = ANSWERED
            self.on_disconnect = None
            self.connection.queue(self, (), b"")
            self.connection.schedule_flush()

    def abort(self) -> None:
        """Break the answer off."""
        if self.is_open:
            self.phase = ANSWERED
            self.on_disconnect = None
            self.connection.reset(self, ErrorCode.INTERNAL_ERROR)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionResetError("the client has left")

    def _begin(self, block: bytes, *, ends: bool) -> None:
        self.phase = ANSWERED
        self.on_disconnect = None
        connection = self.connection
        connection.sender.send_block(self.id, block, END_STREAM if ends else 0)
        if ends:
            connection.finish(self)
        connection.schedule_flush()

    def _come_late(self) -> None:
        """The answer to a request that was closed meanwhile."""
        if self.phase == ABANDONED:
            self.phase = DONE
            self.connection.settle_abandoned()

    # Ends that are not answers.

    def tell_short(self) -> None:
        collector = self._collector
        if self.phase == RECEIVING and collector is not None and collector.error is not None:
            self._refuse(collector.error)

    def cancel(self) -> None:
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()
        if self._is_started:
            self._come_late()  # it learns by the next `write`

    def give_up(self, text: str) -> None:
        self.phase = RUNNING
        self.respond(self._errors().refused(408, text))

    def dismiss(self, text: str) -> None:
        if self.phase >= ANSWERED:
            return
        if self._is_started:  # an answer that has begun cannot be replaced
            self.connection.reset(self, ErrorCode.INTERNAL_ERROR)
            return
        on_disconnect = self.on_disconnect
        self.phase = RUNNING
        self.respond(self._errors().refused(503, text, "unavailable"))
        if on_disconnect is not None:
            on_disconnect()

    def release(self) -> None:
        if self._collector is not None and not self._collector.is_complete:
            self._collector.drop()
