"""The pages that the server brings: the files of a directory of the package, each a route.

Pages are strict about what they load: scripts, styles and data of this server, and nothing inline.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import KeyUse
from modelserver.frontends.http.body import respond_compressed
from modelserver.protocol.api import Route
from modelserver.protocol.compression import choose_encoding
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import HttpResponse

CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/markdown; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_COMPRESSIBLE = frozenset({".css", ".html", ".js", ".json", ".md", ".svg", ".txt"})
_PAGE = "index.html"
_HEADERS = (
    # Browsers keep the files, and ask each time whether they are current.
    ("Cache-Control", "no-cache"),
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


def static_routes(beginning: str, directory: Path) -> tuple[Route, ...]:
    """A route for each file of `directory`, and for the page `index.html` the path `beginning` itself, such as "/docs".

    No key is needed: the files are the same for everybody. They must be of `CONTENT_TYPES`.
    """
    return tuple(
        Route(
            "GET",
            beginning if path.name == _PAGE else f"{beginning}/{path.name}",
            _StaticFile(path).answer,
            ApiGroup.METADATA,
            key=KeyUse.UNUSED,
        )
        for path in sorted(directory.iterdir())
        if path.suffix in CONTENT_TYPES
    )


def entity_tag(*parts: bytes) -> str:
    """An ETag of a document that consists of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f'"{digest.hexdigest()[:32]}"'


def respond_unless_known(exchange: HttpExchange, response: HttpResponse, tag: str, *, is_packed: bool = True) -> None:
    """Answer with the document of that ETag, or by 304 if the client has it; compressed if the client prefers that."""
    headers = exchange.head.headers
    response.headers = (*response.headers, ("ETag", tag), ("Vary", "Accept-Encoding"))
    known = [each.strip().removeprefix("W/") for each in headers.get("if-none-match", "").split(",")]
    if tag in known or known == ["*"]:
        exchange.respond(HttpResponse(304, response.headers))
        return
    accepted = headers.get("accept-encoding") if is_packed else None
    respond_compressed(exchange, response, choose_encoding(accepted) if accepted else None)


class _StaticFile:
    """One file, read when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._headers = (("Content-Type", CONTENT_TYPES[path.suffix]), *_HEADERS)

    @cached_property
    def _content(self) -> tuple[bytes, str]:
        content = self._path.read_bytes()
        return content, entity_tag(content)

    def answer(self, exchange: HttpExchange) -> None:
        if self._path.name == _PAGE and exchange.head.path.endswith("/"):
            # The page's links are relative to the path without the slash, also behind a proxy that puts one before it.
            name = exchange.head.path.rstrip("/").rpartition("/")[2]
            exchange.respond(HttpResponse(308, (("Location", f"../{name}"), *_HEADERS)))
            return
        content, tag = self._content
        response = HttpResponse(200, self._headers, (content,))
        respond_unless_known(exchange, response, tag, is_packed=self._path.suffix in _COMPRESSIBLE)
