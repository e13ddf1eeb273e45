"""From header blocks to streams: decodes a block and decides whether its request may begin."""

from __future__ import annotations

from typing import Final

from modelserver.core.recognition import Memory
from modelserver.protocol.grpc_status import Status
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.address import peer_of
from modelserver.wire.assembly import owner_of
from modelserver.wire.http2.abuse_limits import Closed
from modelserver.wire.http2.frame import END_STREAM, ConnectionFault, ErrorCode, protocol_fault
from modelserver.wire.http2.grpc_ending import trailers_only
from modelserver.wire.http2.head import HeadReader, MalformedError, check_trailers
from modelserver.wire.http2.hpack import Decoder, HeaderListTooLargeError, HpackError
from modelserver.wire.http2.hpack_tables import Field
from modelserver.wire.http2.routes import find_route
from modelserver.wire.http2.sender import Outgoing
from modelserver.wire.http2.stream import ANSWERED, STREAM_SLOTS, Connection, Http2Stream, Refusal, Route

# Blocks that are remembered, and their size.
_MAX_KNOWN: Final = 64
_MAX_KNOWN_BYTES: Final = 512


class RefusedStream(Http2Stream):
    """Sends a refusal, and ignores the request's body."""

    __slots__ = tuple(slot for slot in STREAM_SLOTS if slot != "route")

    def __init__(self, connection: Connection, stream_id: int) -> None:
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
            connection.queue(self, refusal.body, b"")
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

    def filled(self, num_bytes: int) -> None:
        """It has no room."""

    def end(self) -> None:
        """Ignored."""

    def tell_short(self) -> None:
        """It takes no memory."""

    def cancel(self) -> None:
        """No handler runs."""

    def give_up(self, text: str) -> None:
        """It has its answer."""

    def dismiss(self, text: str) -> None:
        """It has its answer."""

    def check_length(self, *, is_complete: bool) -> None:
        """Ignored."""


class Admission:
    """Decodes the header blocks of a connection, all of them, since they share one table.

    `known` maps blocks to their routes. It is valid while the table stays as it is, and cleared otherwise.
    """

    __slots__ = ("_connection", "_decoder", "_heads", "_memory", "known")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decoder = Decoder(connection.context.limits.head.max_http2_list_bytes)
        is_on = connection.context.limits.recognizes
        self._heads = HeadReader(is_on=is_on)
        self._memory = Memory[bytes, Route](_MAX_KNOWN, is_on=is_on)
        self.known = self._memory.known

    def take(self, stream_id: int, flags: int, block: bytes) -> None:
        """A complete block arrived on a stream: its request begins, or its trailers. Raises ConnectionFault."""
        connection = self._connection
        if not stream_id & 1:
            raise protocol_fault(f"HEADERS on stream {stream_id}: clients open streams with odd ids")
        stream = connection.streams.get(stream_id)
        if stream is not None:
            self._take_trailers(stream, flags, self._decode(block))
        elif stream_id <= connection.last_stream_id:
            self._decode(block)
            self._check_late(stream_id)
        else:
            self._open(stream_id, flags, block)

    def _decode(self, block: bytes) -> tuple[Field, ...] | None:
        """The fields, or None for a list over the limit."""
        decoder = self._decoder
        generation = decoder.generation
        try:
            return decoder.decode(block)
        except HeaderListTooLargeError:
            self._connection.count(Violation.HEAD_TOO_LARGE)
            return None
        except HpackError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        finally:
            if decoder.generation != generation:
                self.known.clear()

    def _check_late(self, stream_id: int) -> None:
        """HEADERS on a closed stream: in flight when we reset it, or an error."""
        how = self._connection.closed.get(stream_id)
        if how is Closed.RESET_BY_US:
            self._connection.unended.end(stream_id)
            return
        if how is not None:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which was {how.value}")
        raise protocol_fault(f"HEADERS open stream {stream_id} after a later one")

    def _take_trailers(self, stream: Http2Stream, flags: int, fields: tuple[Field, ...] | None) -> None:
        if stream.is_ended:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS after the end of stream {stream.id}")
        if not flags & END_STREAM:
            raise protocol_fault(f"a second header block that does not end stream {stream.id}")
        try:
            check_trailers(fields or ())
        except MalformedError as error:
            raise protocol_fault(f"the trailers of stream {stream.id} are wrong: {error}") from None
        self._connection.end_of(stream)

    def _open(self, stream_id: int, flags: int, block: bytes) -> None:
        connection, decoder = self._connection, self._decoder
        generation = decoder.generation
        found: Route | Refusal | None = self.known.get(block)
        # Decoded even when the stream is refused: the table must follow.
        fields = () if found is not None else self._decode(block)
        if not connection.admits(stream_id):
            return
        if found is None:
            found = self._find(stream_id, fields)
        if isinstance(found, Route):
            if decoder.generation == generation:
                self._remember(block, found)
            stream = found.open(connection, stream_id, found)
            connection.streams[stream_id] = stream
            if flags & END_STREAM:
                connection.end_of(stream)
        elif found is not None:
            refused = RefusedStream(connection, stream_id)
            refused.is_ended = bool(flags & END_STREAM)
            connection.streams[stream_id] = refused
            self._refuse(refused, found)

    def _find(self, stream_id: int, fields: tuple[Field, ...] | None) -> Route | Refusal | None:
        """The route of the fields; None for a malformed request, whose stream is reset here."""
        if fields is None:
            return _TOO_LARGE
        try:
            head = self._heads.read(fields)
        except MalformedError:
            self._connection.refuse(stream_id, ErrorCode.PROTOCOL_ERROR)
            return None
        return find_route(self._connection.context, head, peer_of(self._connection.transport))

    def _refuse(self, stream: RefusedStream, refusal: Refusal) -> None:
        """Answer. A caller that is refused again and again, and sends bodies, must wait for it."""
        context, wait_s = self._connection.context, 0.0
        if refusal.is_of_caller and not stream.is_ended:
            wait_s = context.refused_peers.wait_s(owner_of("", peer_of(self._connection.transport)))
        if wait_s > 0:
            context.loop.call_later(wait_s, stream.answer_late, refusal)
        else:
            stream.answer(refusal)

    def _remember(self, block: bytes, route: Route) -> None:
        if len(block) <= _MAX_KNOWN_BYTES:
            self._memory.remember(block, route)


# An answer that clients of HTTP and of gRPC understand: the kind of client is unknown.
_TOO_LARGE: Final = Refusal(
    trailers_only(Status.RESOURCE_EXHAUSTED, "the header list of the request is over the announced limit", 431)
)
