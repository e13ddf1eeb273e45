"""The source of a remote model's endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from modelserver.client.address import Address
from modelserver.client.http_pool import HttpPool, http_lines
from modelserver.endpoints.membership import Source, StaticSource, parse_source
from modelserver.remote.options import RemoteOptions


def source_of(options: RemoteOptions) -> Source:
    """Raises InvalidArgumentError for a source that is not written as one."""
    if options.endpoints:
        return StaticSource(options.endpoints)

    def open_lines(url: str) -> AsyncIterator[bytes]:
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        address = Address(
            parts.hostname or "", parts.port or (443 if is_secure else 80), options.tls if is_secure else None
        )
        pool = HttpPool(address, connect_timeout_s=options.connect_timeout_s)
        key = options.secret.read()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return http_lines(pool, parts.path + (f"?{parts.query}" if parts.query else "") or "/", headers)

    return parse_source(options.discover, open_lines=open_lines, scheme=options.scheme)
