"""The head of an HTTP/2 request as HTTP handlers see it."""

from __future__ import annotations

from modelserver.protocol.exchange import HttpHead
from modelserver.wire.http2.static_table import Field


def make_http_head(method: bytes, path: bytes, authority: bytes, fields: tuple[Field, ...]) -> HttpHead:
    """The shared head of the HTTP frontend; a repeated field becomes one (RFC 9110, 5.2; RFC 9113, 8.2.3)."""
    target, _, query = path.decode("latin-1").partition("?")
    headers: dict[str, str] = {"host": authority.decode("latin-1")} if authority else {}
    for name_bytes, value_bytes in fields:
        if name_bytes.startswith(b":") or name_bytes == b"host":  # the authority is the host
            continue
        name, value = name_bytes.decode("ascii"), value_bytes.decode("latin-1")
        if name in headers:
            value = f"{headers[name]}{'; ' if name == 'cookie' else ', '}{value}"
        headers[name] = value
    return HttpHead(method.decode("ascii"), target, headers, query)
