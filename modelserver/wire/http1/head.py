"""The heads of HTTP/1.1: a request's, from its bytes to one record, and an answer's.

llhttp parses, strictly; here are the rules that it leaves to us (RFC 9112, 3 and 6). Everything depends on the
bytes of the head only, never on how they arrived or on earlier requests: equal heads may share one record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import quote

import httptools

from modelserver.core.numerals import is_digits
from modelserver.protocol.exchange import HttpHead
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.limits import HeadLimits, WireLimits

END_OF_HEAD = b"\r\n\r\n"

# A first line without a version and a path belongs to another protocol.
_LIKE_A_REQUEST = re.compile(rb"[^\r\n]* (HTTP/|/|[A-Za-z]+://|\*)")
_REQUEST_LINE = re.compile(rb"[A-Z-]+ (\S+) HTTP/(\d\.\d)\r\n")
_ABSOLUTE_FORM = re.compile(r"(?i:https?)://([^/?#]+)([^?]*)(.*)")
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


class RefusedError(Exception):
    """The received bytes are not a request that we serve: answer `status` with the reason, and close."""

    def __init__(self, status: int, message: str, violation: Violation = Violation.PROTOCOL) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.violation = violation


class ForeignError(RefusedError):
    """The bytes are of another protocol: at the beginning of a connection, its client could not read an answer."""


class RequestHead:
    """A checked head: the part for the frontend, and the facts about the body and the connection.

    `content_length` is 0 if there is none. `has_plain_body` says that the body is just that many bytes, within the
    limit, which the client sends without being asked; `has_plain_answer` says that the answer has a body and leaves the
    connection open. `json_length` says where the tensors of an infer request begin, if the client is right.
    """

    __slots__ = (
        "content_length",
        "expects_continue",
        "has_plain_answer",
        "has_plain_body",
        "http",
        "is_chunked",
        "is_head",
        "is_http_1_0",
        "json_length",
        "keeps_alive",
    )

    def __init__(self, http: HttpHead, max_body_bytes: int, *, is_http_1_0: bool) -> None:
        headers = http.headers
        connection = headers.get("connection")
        options = [option.strip().lower() for option in connection.split(",")] if connection else []
        self.http = http
        self.content_length = content_length(headers) or 0
        self.is_chunked = "transfer-encoding" in headers
        self.json_length = json_length(headers)
        self.is_http_1_0 = is_http_1_0
        self.is_head = http.method == "HEAD"
        self.keeps_alive = "close" not in options and (not is_http_1_0 or "keep-alive" in options)
        self.has_plain_answer = self.keeps_alive and not is_http_1_0 and not self.is_head
        # HTTP/1.0 clients do not understand this expectation (RFC 9110, 10.1.1).
        has_body = self.is_chunked or self.content_length > 0
        self.expects_continue = "expect" in headers and has_body and not is_http_1_0
        is_too_long = self.content_length > max_body_bytes
        self.has_plain_body = not self.is_chunked and not self.expects_continue and not is_too_long


def check_beginning(data: bytes, limits: HeadLimits) -> None:
    """Raise RefusedError if `data`, the beginning of a head or all of it, cannot become one.

    Judges the same bytes the same way regardless of what follows, so that a refusal does not depend on how the bytes
    were split into reads.
    """
    limit = limits.max_http1_bytes
    beginning = data[:limit]
    start = 2 if beginning.startswith(b"\r\n") else 0  # an empty line before a request is allowed (RFC 9112, 2.2)
    first = beginning[start : start + 1]
    if first and not b"A" <= first <= b"Z" and beginning != b"\r":
        raise RefusedError(400, "this is not HTTP/1.1: a request begins with a method in capital letters")
    if beginning.count(b"\n") != beginning.count(b"\r\n"):
        raise RefusedError(400, "this is not valid HTTP/1.1: a line ends without a carriage return")
    if len(data) > limit:
        if b"\r\n" not in beginning[start:]:
            raise _target_too_long(limits)
        raise RefusedError(
            431, f"the request line and headers are over the limit of {limit} bytes", Violation.HEAD_TOO_LARGE
        )


def read_head(data: bytes, wire_limits: WireLimits) -> RequestHead:
    """The record of a whole head, up to and including its empty line. Raises RefusedError."""
    limits = wire_limits.head
    check_beginning(data, limits)
    data = data.removeprefix(b"\r\n")
    lines = _Lines()
    parser = httptools.HttpRequestParser(lines)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # an offer that we do not take, or CONNECT; llhttp does not read bodies here, so it cannot misplace one
    except httptools.HttpParserError as error:
        is_framing = "Content-Length" in str(error) or "Transfer-Encoding" in str(error)
        violation = Violation.SMUGGLING if is_framing else Violation.PROTOCOL
        if _LIKE_A_REQUEST.match(data) is None:
            raise ForeignError(400, "this is not HTTP/1.1: the first line has neither a path nor a version") from None
        raise RefusedError(400, f"this is not valid HTTP/1.1: {error}", violation) from None
    request_line = _REQUEST_LINE.match(data)
    if request_line is None or not lines.is_complete:
        raise RefusedError(400, "this is not valid HTTP/1.1: the first line is not method, target and version")
    version = request_line[2]
    if version not in (b"1.0", b"1.1"):
        raise RefusedError(505, f"HTTP/{version.decode()} is not served here, use HTTP/1.1")
    if len(lines.target) > limits.max_target_bytes:
        raise _target_too_long(limits)
    if len(lines.fields) > limits.max_http1_fields:
        raise RefusedError(
            431, f"the request has over {limits.max_http1_fields} header lines", Violation.HEAD_TOO_LARGE
        )
    headers = _headers(lines.fields)
    is_http_1_0 = version == b"1.0"
    _check_host(lines.fields, headers, is_http_1_0=is_http_1_0)
    _check_framing(headers, is_http_1_0=is_http_1_0)
    method = parser.get_method().decode("latin-1")
    if method == "CONNECT":
        raise RefusedError(405, "this server is not a proxy: CONNECT is not served")
    path, query = _split_target(lines.target.decode("latin-1"), headers)
    http = HttpHead(method, path, headers, query, _names(lines.fields))
    return RequestHead(http, wire_limits.max_body_bytes, is_http_1_0=is_http_1_0)


class _Lines:
    """The parts of one head that llhttp reports."""

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.is_complete = False

    def on_url(self, piece: bytes) -> None:
        self.target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def _target_too_long(limits: HeadLimits) -> RefusedError:
    message = f"the request target is over the limit of {limits.max_target_bytes} bytes"
    return RefusedError(414, message, Violation.HEAD_TOO_LARGE)


def _headers(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name; lines of the same name are joined (RFC 9110, 5.3). `_` and `-` stay what they are."""
    headers: dict[str, str] = {}
    for name, value in fields:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _names(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The names that are not in lower case, by their lower-case form; for joined lines, the first one's."""
    names: dict[str, str] = {}
    for field, _ in fields:
        name = field.decode("latin-1")
        if (key := name.lower()) != name:
            names.setdefault(key, name)
    return names


def _check_host(fields: list[tuple[bytes, bytes]], headers: Mapping[str, str], *, is_http_1_0: bool) -> None:
    """RFC 9112, 3.2: exactly one, with a valid form."""
    num_hosts = sum(name.lower() == b"host" for name, _ in fields)
    if num_hosts > 1 or (num_hosts == 0 and not is_http_1_0):
        raise RefusedError(400, f"a request must have one Host header, this one has {num_hosts}", Violation.SMUGGLING)
    if not _HOST.fullmatch(headers.get("host", "")):
        raise RefusedError(400, "the Host header is not a host and port", Violation.SMUGGLING)


def _check_framing(headers: Mapping[str, str], *, is_http_1_0: bool) -> None:
    """Refuse heads that two readers could read differently; llhttp has refused the other cases (RFC 9112, 6)."""
    coding = headers.get("transfer-encoding")
    if coding is not None and is_http_1_0:
        raise RefusedError(400, "HTTP/1.0 has no Transfer-Encoding", Violation.SMUGGLING)
    if coding is not None and coding.lower() != "chunked":
        raise RefusedError(
            501, f"Transfer-Encoding '{coding:.40}' is not served, use chunked or a Content-Length", Violation.SMUGGLING
        )
    expectation = headers.get("expect")
    if expectation is not None and expectation.lower() != "100-continue":
        raise RefusedError(417, f"the expectation '{expectation:.40}' is not known, only 100-continue is")


def _split_target(target: str, headers: dict[str, str]) -> tuple[str, str]:
    """The path as sent, and the query. A target in absolute form sets the host (RFC 9112, 3.2.2)."""
    if not target.startswith("/") and target != "*":
        absolute = _ABSOLUTE_FORM.fullmatch(target)
        if absolute is None or not _HOST.fullmatch(absolute[1]):
            raise RefusedError(400, "the request target must be a path, or a URL that begins with http://")
        headers["host"] = absolute[1]
        target = (absolute[2] or "/") + absolute[3]
    path, _, query = target.partition("?")
    return path, query


def content_length(headers: Mapping[str, str]) -> int | None:
    """The announced size of the body; the parser has checked that it is a number."""
    length = headers.get("content-length")
    return int(length) if length is not None else None


def json_length(headers: Mapping[str, str]) -> int:
    """Where an infer request's tensors begin; only a hint, the frontend checks it."""
    text = headers.get("inference-header-content-length", "")
    return int(text) if is_digits(text) else 0


# Characters allowed in the value of a header (RFC 9110, 5.5), except Latin-1 letters, which readers treat differently.
_VALUE_CHARACTERS = "\t" + "".join(map(chr, range(0x20, 0x7F)))
_REASONS = {status.value: status.phrase for status in HTTPStatus}

# Answers that have no body, and no header that tells its size (RFC 9110, 8.6).
BODYLESS = frozenset({204, 304})

LENGTH = b"Content-Length: %d\r\n\r\n"
LENGTH_AND_CLOSE = b"Content-Length: %d\r\nConnection: close\r\n\r\n"
# For HTTP/1.0 clients that asked for it.
LENGTH_AND_KEEP_ALIVE = b"Content-Length: %d\r\nConnection: keep-alive\r\n\r\n"
NO_LENGTH = b"\r\n"
CLOSE = b"Connection: close\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@lru_cache(maxsize=512)
def answer_start(status: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    """The status line and the headers, without those that frame the body. Most answers repeat theirs."""
    lines = "".join([f"{name}: {field_value(value)}\r\n" for name, value in headers])
    return f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n{lines}".encode("latin-1")


def field_value(text: str) -> str:
    """`text` as the value of a header: line ends and characters outside ASCII are percent-encoded.

    Values may quote text from users: this prevents them from injecting headers.
    """
    if text.isascii() and text.isprintable():
        return text
    return quote(text, safe=_VALUE_CHARACTERS, errors="replace")
