"""Finds the handler of a request by its head."""

from __future__ import annotations

from typing import Final

from modelserver.auth.access import EVERYBODY
from modelserver.protocol.call import RpcError
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.response import PLAIN_ERRORS, ErrorWriter, HttpResponse
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.context import WireContext
from modelserver.wire.http2.grpc_call import CompressingCall, GrpcCall
from modelserver.wire.http2.grpc_compression import choose_encoding
from modelserver.wire.http2.grpc_ending import DEADLINE_TEXT, trailers_only
from modelserver.wire.http2.grpc_stream import GrpcStream
from modelserver.wire.http2.head import RequestHead
from modelserver.wire.http2.rest_exchange import RestExchange, answer_block, length_field
from modelserver.wire.http2.stream import Refusal, Route

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
