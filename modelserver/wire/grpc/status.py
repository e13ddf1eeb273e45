"""How a call ends on the wire: header blocks with status and text (gRPC's PROTOCOL-HTTP2, "Responses")."""

from __future__ import annotations

from typing import Final

from modelserver.wire.http2.hpack import literal

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
