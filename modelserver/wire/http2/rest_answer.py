"""The header block of an HTTP answer over HTTP/2 (RFC 9113, 8.2 and 8.3.2)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from modelserver.wire.http1.answer import field_value
from modelserver.wire.http2.hpack import literal

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
