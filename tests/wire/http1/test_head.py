from __future__ import annotations

from dataclasses import replace

import pytest

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http1.head import RefusedError, RequestHead, check_beginning, json_length, read_head
from modelserver.wire.limits import HeadLimits, WireLimits

LIMITS = replace(
    WireLimits(),
    head=HeadLimits(max_target_bytes=50, max_http1_bytes=200, max_http1_fields=5),
    max_body_bytes=100,
)


def _head(*lines: str, first: str = "GET /a HTTP/1.1", host: str = "Host: test\r\n") -> RequestHead:
    text = "".join([f"{line}\r\n" for line in lines])
    return read_head(f"{first}\r\n{host}{text}\r\n".encode("latin-1"), LIMITS)


def test_a_head_says_what_was_asked() -> None:
    http = _head("X-Sent:  a b\t", "Accept: a", "ACCEPT: b", "X_Sent: c", first="GET /a%20b?c=%20d HTTP/1.1").http
    assert (http.method, http.path, http.query) == ("GET", "/a%20b", "c=%20d")
    assert http.headers == {"host": "test", "x-sent": "a b", "accept": "a, b", "x_sent": "c"}


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://other:80/a%2Fb?c=d", "/a%2Fb", "c=d"),
        ("HTTP://other:80", "/", ""),
        ("https://other:80?c", "/", "c"),
    ],
)
def test_a_target_in_absolute_form_decides_on_the_host(target: str, path: str, query: str) -> None:
    http = _head(first=f"GET {target} HTTP/1.1").http
    assert (http.path, http.query, http.headers["host"]) == (path, query, "other:80")


@pytest.mark.parametrize(
    ("first", "lines", "keeps_alive"),
    [
        ("GET / HTTP/1.1", [], True),
        ("GET / HTTP/1.1", ["Connection: close"], False),
        ("GET / HTTP/1.1", ["Connection: Keep-Alive, CLOSE"], False),
        ("GET / HTTP/1.1", ["Connection: closed"], True),
        ("GET / HTTP/1.0", [], False),
        ("GET / HTTP/1.0", ["Connection: Keep-Alive"], True),
        ("GET / HTTP/1.0", ["Connection: keep-alive", "Connection: close"], False),
    ],
)
def test_whether_the_connection_stays(first: str, lines: list[str], keeps_alive: bool) -> None:
    assert _head(*lines, first=first).keeps_alive is keeps_alive


@pytest.mark.parametrize(
    ("lines", "is_plain"),
    [
        ([], True),
        (["Content-Length: 100"], True),
        (["Content-Length: 101"], False),
        (["Transfer-Encoding: chunked"], False),
        (["Content-Length: 5", "Expect: 100-Continue"], False),
        (["Expect: 100-continue"], True),  # there is nothing to wait for
    ],
)
def test_which_bodies_just_come(lines: list[str], is_plain: bool) -> None:
    assert _head(*lines, first="POST / HTTP/1.1").has_plain_body is is_plain


def test_an_http_1_0_client_is_not_invited() -> None:
    assert not _head("Content-Length: 5", "Expect: 100-continue", first="POST / HTTP/1.0").expects_continue


def test_an_http_1_0_client_need_not_name_the_host() -> None:
    assert _head(first="GET / HTTP/1.0", host="").is_http_1_0


def _status(data: bytes) -> int:
    with pytest.raises(RefusedError) as refused:
        read_head(data, LIMITS)
    assert refused.value.violation in (Violation.HEAD_TOO_LARGE, Violation.PROTOCOL)
    return refused.value.status


def test_limits_are_exact() -> None:
    read_head(b"GET /%s HTTP/1.1\r\nHost: test\r\n\r\n" % (b"a" * 49), LIMITS)
    assert _status(b"GET /%s HTTP/1.1\r\nHost: test\r\n\r\n" % (b"a" * 50)) == 414
    read_head(b"GET / HTTP/1.1\r\nHost: test\r\n" + b"A: b\r\n" * 4 + b"\r\n", LIMITS)
    assert _status(b"GET / HTTP/1.1\r\nHost: test\r\n" + b"A: b\r\n" * 5 + b"\r\n") == 431
    start = b"GET / HTTP/1.1\r\nHost: test\r\nA: "
    read_head(start + b"a" * (196 - len(start)) + b"\r\n\r\n", LIMITS)
    assert _status(start + b"a" * (197 - len(start)) + b"\r\n\r\n") == 431


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 300, 414),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 300, 431),
        (b"get /", 400),
        (b"\x16\x03", 400),
        (b"\rG", 400),
        (b"GET / HTTP/1.1\n", 400),
        (b"\n", 400),
        (b"GET / HTTP/1.1\n" + b"a" * 300, 400),
        (b"GET / HTTP/1.1\r\n" + b"a" * 300 + b"\n", 431),
    ],
)
def test_a_beginning_that_becomes_no_head(data: bytes, status: int) -> None:
    statuses = [_status_of_beginning(data[:end]) for end in range(len(data) + 1)]
    # Refused from some byte on, and never with another status.
    first = statuses.index(status)
    assert statuses == [None] * first + [status] * (len(statuses) - first)


def _status_of_beginning(data: bytes) -> int | None:
    try:
        check_beginning(data, LIMITS.head)
    except RefusedError as refused:
        return refused.status
    return None


@pytest.mark.parametrize(
    "data", [b"", b"\r", b"\r\n", b"\r\nG", b"G", b"GET / HTTP/1.1\r", b"GET / HTTP/1.1\r\nA: b\r\n"]
)
def test_a_beginning_that_may_become_a_head(data: bytes) -> None:
    check_beginning(data, LIMITS.head)


@pytest.mark.parametrize(("text", "length"), [("7", 7), ("", 0), ("-1", 0), ("\xb2", 0), ("9" * 30, 0)])
def test_the_length_of_the_json_is_a_hint(text: str, length: int) -> None:
    assert json_length({"inference-header-content-length": text}) == length
