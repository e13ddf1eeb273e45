"""What must hold of an HTTP/1.1 connection for any bytes: used by the tests of the suite and by `fuzz.run`."""

from __future__ import annotations

import re
from collections.abc import Callable

import httptools
from fuzz.conversation import converse
from fuzz.parsers import pieces_of
from support.replaying import ReplayHttp

from modelserver.wire.http1.connection import Http1Connection

Request = tuple[str, str, str, bytes]
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def http1_bytes(data: bytes) -> None:
    """Whoever receives them in whichever pieces, the same answers come to the requests that llhttp finds, too."""
    check_http1(data, pieces_of(data))


def http1_pieces(data: bytes) -> None:
    """As `http1_bytes`, for bytes that come in pieces of whose lengths the data decides."""
    pieces = pieces_of(data)
    check_http1(b"".join(pieces), pieces)


def check_http1(data: bytes, pieces: list[bytes]) -> None:
    """The answers to `data`, whole and in pieces, are the same, and no handler got what llhttp does not find."""
    whole, http = answers([data])
    found = llhttp_requests(_without_upgrades(data))
    read = [(*head, _without_upgrades(body)) for *head, body in http.requests]
    assert read == found[: len(read)], "we read other requests than llhttp does"
    if b"".join(pieces) == data:
        again, http_again = answers(pieces)
        assert http_again.requests == http.requests
        assert again == whole, "the answer depends on how the request was cut"


def answers(pieces: list[bytes]) -> tuple[bytes, ReplayHttp]:
    """What comes back, and what the handlers saw. Without invitations, which depend on what has come already."""
    http = ReplayHttp()
    written = converse(Http1Connection, pieces, http=http)
    return written.replace(_CONTINUE, b""), http


def _without_upgrades(data: bytes) -> bytes:
    """With other names for the fields that we ignore: llhttp takes what follows such a head for another protocol."""
    return re.sub(rb"(?i)\nupgrade(?=[ :])", b"\nx-grade", data)


class _Messages:
    """What llhttp finds, as far as it is complete."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.requests: list[Request] = []
        self._target = self._body = b""

    def on_message_begin(self) -> None:
        self._target = self._body = b""

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        target = self._target.decode("latin-1")
        if not target.startswith("/") and "://" in target:
            authority, slash, rest = target.partition("://")[2].partition("/")
            _host, mark, query = authority.partition("?")
            target = f"/?{query}" if mark else slash + rest
        path, _, query = (target or "/").partition("?")
        self.requests.append((self.parser.get_method().decode(), path, query, self._body))


def llhttp_requests(data: bytes) -> list[Request]:
    """The complete requests in `data` up to the first error; an upgrade that is offered is not taken."""
    messages = _Messages()
    while True:
        try:
            messages.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            found = messages.requests
            data = data[upgrade.args[0] :]
            messages = _Messages()
            messages.requests = found
            continue
        except httptools.HttpParserError:
            pass
        return messages.requests


TARGETS: dict[str, Callable[[bytes], None]] = {target.__name__: target for target in (http1_bytes, http1_pieces)}
