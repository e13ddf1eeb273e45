"""How gRPC calls begin and end on the wire: header blocks with status and text (gRPC's PROTOCOL-HTTP2, "Responses")."""

from __future__ import annotations

import logging
from typing import Final

from modelserver.protocol.call import RpcError
from modelserver.protocol.grpc_status import PUSHBACK, Status
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.frame import END_STREAM
from modelserver.wire.http2.grpc_compression import ACCEPT_ENCODING
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.message import BudgetSpentError
from modelserver.wire.http2.stream import Http2Stream

_STATUS_OK_FIELD: Final = b"\x88"  # ":status: 200" of the static table
CONTENT_TYPE: Final = literal(b"content-type", b"application/grpc")
# The block before the first message of an answer.
RESPONSE_HEADERS: Final = _STATUS_OK_FIELD + CONTENT_TYPE

_STATUS_FIELDS: Final = [literal(b"grpc-status", b"%d" % status) for status in range(17)]
OK_TRAILERS: Final = _STATUS_FIELDS[0]

# Printable ASCII stays as it is, except the percent sign.
_ENCODED: Final = [
    bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != ord("%") else b"%%%02X" % byte for byte in range(256)
]


def percent_encode(text: str) -> bytes:
    """`text` as `grpc-message` carries it: UTF-8, percent-encoded; lone surrogates become `?`."""
    data = text.encode(errors="replace")
    if data.isascii() and text.isprintable() and b"%" not in data:
        encoded = data
    else:
        encoded = b"".join([_ENCODED[byte] for byte in data])
    # Header values neither begin nor end with a blank (RFC 9113, 8.2.1).
    if encoded.startswith(b" "):
        encoded = b"%20" + encoded[1:]
    return encoded[:-1] + b"%20" if encoded.endswith(b" ") else encoded


def trailers(status: int, text: str = "") -> bytes:
    """The header block that ends an answer after its messages; no text, no `grpc-message`."""
    field = _STATUS_FIELDS[status]
    return field + literal(b"grpc-message", percent_encode(text)) if text else field


def trailers_only(status: int, text: str = "", http_status: int = 200) -> bytes:
    """The one header block of an answer without messages; `http_status` tells clients that do not speak gRPC."""
    status_field = _STATUS_OK_FIELD if http_status == 200 else literal(b":status", b"%d" % http_status)
    return status_field + CONTENT_TYPE + trailers(status, text)


_logger = logging.getLogger(__name__)

# gRPC's core uses the same words.
DEADLINE_TEXT: Final = "Deadline Exceeded"
_ACCEPT_ENCODING_FIELD: Final = literal(b"grpc-accept-encoding", ACCEPT_ENCODING)


def end_call(stream: Http2Stream, status: int, text: str, *, has_headers: bool = False, retry_ms: int = 0) -> None:
    """End a call whose answer is not complete with a status other than OK. Queued data is dropped.

    `retry_ms`, if given, goes where gRPC's clients look for it (A6, "Pushback").
    """
    connection = stream.connection
    connection.drop(stream)
    block = trailers(status, text) if has_headers else trailers_only(status, text)
    if status == Status.UNIMPLEMENTED:
        block += _ACCEPT_ENCODING_FIELD
    if retry_ms:
        block += literal(PUSHBACK.encode(), b"%d" % retry_ms)
    connection.sender.send_block(stream.id, block, END_STREAM)
    connection.finish(stream)
    connection.schedule_flush()


def refuse(stream: Http2Stream, error: RpcError, *, has_headers: bool = False) -> None:
    """End a call whose message is not acceptable."""
    if isinstance(error, BudgetSpentError):
        stream.connection.count(Violation.ASSEMBLY_BUDGET)
    end_call(stream, error.status, error.message, has_headers=has_headers)


def internal_error(error: BaseException) -> RpcError:
    """The status for a handler that failed unexpectedly; logged here."""
    _logger.error("a gRPC handler failed", exc_info=error)
    return RpcError(Status.INTERNAL, f"internal error ({type(error).__name__}); the server's log has the details")
