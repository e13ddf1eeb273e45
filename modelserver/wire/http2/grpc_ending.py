"""How gRPC calls begin and end on the wire, whether unary or streaming."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from modelserver.protocol.call import RpcError
from modelserver.protocol.grpc_status import PUSHBACK, Status
from modelserver.telemetry.wire import Violation
from modelserver.wire.grpc.compression import ACCEPT_ENCODING
from modelserver.wire.grpc.status import trailers, trailers_only
from modelserver.wire.http2.frame import END_STREAM
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.message import BudgetSpentError

if TYPE_CHECKING:
    from modelserver.wire.http2.stream import Http2Stream

_logger = logging.getLogger(__name__)

# gRPC's core uses the same words.
DEADLINE_TEXT: Final = "Deadline Exceeded"
_ACCEPT_ENCODING_FIELD: Final = literal(b"grpc-accept-encoding", ACCEPT_ENCODING)


def end_call(stream: Http2Stream, status: int, text: str, *, has_headers: bool = False, retry_ms: int = 0) -> None:
    """End a call whose answer is not complete with a status other than OK. Queued data is dropped.

    `retry_ms`, if given, goes where gRPC's clients look for it (A6, "Pushback").
    """
    connection = stream.connection
    connection.sender.drop(stream)
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
