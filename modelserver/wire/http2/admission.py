"""From header blocks to streams: decodes a block and decides whether its request may begin."""

from __future__ import annotations

from typing import Final

from modelserver.auth.access import EVERYBODY
from modelserver.core.recognition import Memory
from modelserver.protocol.call import RpcError
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.response import PLAIN_ERRORS, ErrorWriter, HttpResponse
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.address import peer_of
from modelserver.wire.assembly import owner_of
from modelserver.wire.context import WireContext
from modelserver.wire.http2.abuse_limits import Closed
from modelserver.wire.http2.frame import END_STREAM, ConnectionFault, ErrorCode, protocol_fault
from modelserver.wire.http2.grpc_call import CompressingCall, GrpcCall
from modelserver.wire.http2.grpc_compression import choose_encoding
from modelserver.wire.http2.grpc_ending import DEADLINE_TEXT, trailers_only
from modelserver.wire.http2.grpc_stream import GrpcStream
from modelserver.wire.http2.head import HeadReader, MalformedError, RequestHead, check_trailers
from modelserver.wire.http2.hpack import Decoder, HeaderListTooLargeError, HpackError
from modelserver.wire.http2.hpack_tables import Field
from modelserver.wire.http2.rest_exchange import RestExchange, answer_block, length_field
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

_GRPC_LIKE: Final = b"application/grpc"
_NO_GRPC: Final = "this port serves HTTP only; gRPC is served on another one (--grpc-port)"
_NO_HTTP: Final = "this port serves gRPC only (application/grpc); HTTP is served on another one (--http-port)"


def find_route(context: WireContext, head: RequestHead, peer: str) -> Route | Refusal:
    """The route of a request from the client at `peer`, or the answer to a request that is unknown or not allowed."""
    if head.is_grpc:
        return _find_method(context, head, peer)
    if head.content_type.startswith(_GRPC_LIKE):
        return _refusal(415, f"content-type {head.content_type[:60]!r} is not supported: gRPC's is application/grpc")
    if context.http is None:
        return _refusal(415, _NO_HTTP)
    checked = context.http.check_head(head.http, peer)
    if isinstance(checked, HttpResponse):
        return _answer(checked, is_of_caller=True)
    max_bytes = context.limits.max_body_bytes
    if checked.open_body is None and head.content_length is not None and head.content_length > max_bytes:
        context.counts.violated(Protocol.HTTP2, Violation.BODY_TOO_LARGE)
        over = f"request JSON size of more than {max_bytes} bytes exceeds the maximum allowed input size of"
        text = f"{over} {max_bytes} bytes; raise it with --http-max-input-size"
        return _refusal(413, text, context.http.errors(head.path.decode("latin-1")), "request_too_large")
    return Route(head, RestExchange, context.http.handle, admitted=checked)


def _find_method(context: WireContext, head: RequestHead, peer: str) -> Route | Refusal:
    if head.problem is not None:
        status, text = head.problem
        return Refusal(trailers_only(status, text, head.http_status))
    if context.grpc is None:
        return Refusal(trailers_only(Status.UNIMPLEMENTED, _NO_GRPC))
    path = head.path.decode("latin-1")
    method = context.grpc.methods.get(path)
    if method is None:
        return Refusal(trailers_only(Status.UNIMPLEMENTED, f"Method not found! There is no '{path:.200}'"))
    if head.timeout_ns == 0:
        return Refusal(trailers_only(Status.DEADLINE_EXCEEDED, DEADLINE_TEXT))
    if method.relay is not None:
        return Route(head, method.relay, _unhandled)
    admitted, check_head = EVERYBODY, method.check_head
    if check_head is not None:
        try:
            admitted = check_head(head.metadata, peer)
        except RpcError as error:
            return Refusal(trailers_only(error.status, error.message), is_of_caller=True)
    compresses = context.limits.grpc_compression != "none"
    encoding = choose_encoding(head.accept_encodings) if compresses else None
    if method.unary is not None:
        kind = GrpcCall if encoding is None else CompressingCall
        return Route(head, kind, method.unary, encoding, admitted, check_head)
    assert method.stream is not None, "a method is unary or a stream"
    return Route(head, GrpcStream, method.stream, encoding, admitted, check_head)


def _unhandled(_stream: object) -> None:
    """A relayed stream has no handler."""


def _refusal(status: int, text: str, errors: ErrorWriter = PLAIN_ERRORS, code: str | None = None) -> Refusal:
    return _answer(errors.refused(status, text, code))


def _answer(response: HttpResponse, *, is_of_caller: bool = False) -> Refusal:
    status = response.status
    block = answer_block(status, tuple(response.headers))
    return Refusal(block + length_field(sum(map(len, response.body))), response.body, is_of_caller=is_of_caller)
