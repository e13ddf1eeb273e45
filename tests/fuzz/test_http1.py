"""HTTP/1.1 connections: noise, and requests of which some are wrong, in any pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fuzz.http1_connection import TARGETS, answers, check_http1, llhttp_requests
from hypothesis import given, settings
from hypothesis import strategies as st


def _mostly(usual: list[bytes], odd: list[bytes]) -> st.SearchStrategy[bytes]:
    """Nine of ten are usual: a stream is only read as far as its first fault."""
    return st.integers(0, 9).flatmap(lambda number: st.sampled_from(usual if number != 7 else odd))


METHODS = _mostly([b"GET", b"POST", b"HEAD", b"PUT"], [b"OPTIONS", b"CONNECT", b"get", b"PRI", b"M-SEARCH", b""])
PATHS = _mostly([b"/", b"/a%20b?c=%20", b"http://host/path?q"], [b"http://h?q", b"*", b"h:1", b"a", b"/\xc3\xa9", b""])
VERSIONS = _mostly([b"HTTP/1.1"], [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b""])
USUAL_LINES = st.sampled_from(
    [b"Accept: */*", b"Connection: keep-alive", b"X-Empty:", b"X: a", b"x:b", b"Expect: 100-continue"]
)
ODD_LINES = st.sampled_from(
    [
        b"Connection: close",
        b"Connection: Upgrade\r\nUpgrade: h2c",
        b"Host: again",
        b"Host:",
        b"Content-Length: 3",
        b"Content-Length: +3",
        b"Content-Length: 0x3",
        b"Content-Length: 3, 3",
        b"Content-Length:",
        b"content_length: 1",
        b"Content-Length : 1",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding:\x0bchunked",
        b"Expect: something",
        b" folded",
        b"no colon",
        b"Null: \0",
        b"Bare: a\rb",
        b"Line: a\nb: c",
        b": nameless",
    ]
)
BODIES = st.sampled_from([b"", b"abc", b"GET / HTTP/1.1\r\nHost: smuggled\r\n\r\n", b"0\r\n\r\n"]) | st.binary(
    max_size=40
)
CHUNK_HEADS = _mostly([b"%x", b"%X", b"0%x", b"%x;name=value"], [b" %x", b"%x ", b"0x%x", b"+%x", b"%x\n", b"_%x"])
TRAILERS = _mostly([b"", b"T: a\r\n"], [b"Content-Length: 5\r\n", b"bad\r\n", b" a: b\r\n"])
FRAMINGS = _mostly([b"length", b"chunks"], [b"none", b"wrong length"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    lines = [b" ".join([draw(METHODS), draw(PATHS), draw(VERSIONS)]), b"Host: host:8000"]
    lines += draw(st.lists(USUAL_LINES, max_size=3))
    lines += draw(st.lists(ODD_LINES, max_size=1)) if draw(st.integers(0, 5)) == 3 else []
    body = draw(BODIES)
    match draw(FRAMINGS):
        case b"length":
            lines.append(b"Content-Length: %d" % len(body))
        case b"wrong length":
            lines.append(b"Content-Length: %d" % (len(body) + draw(st.sampled_from([-1, 1, 10**19]))))
        case b"chunks":
            lines.append(b"Transfer-Encoding: chunked")
            chunks = [body[:1], body[1:]] if len(body) > 1 else [body] * bool(body)
            encoded = [draw(CHUNK_HEADS) % len(chunk) + b"\r\n" + chunk + b"\r\n" for chunk in chunks]
            body = b"".join(encoded) + b"0\r\n" + draw(TRAILERS) + b"\r\n"
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` in pieces: single bytes, or cut at a few places."""
    if draw(st.booleans()):
        return [data[at : at + 1] for at in range(len(data))]
    ends = sorted(draw(st.sets(st.integers(0, len(data)), max_size=6)) | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", list(TARGETS))
@given(data=st.binary(max_size=100))
def test_noise(name: str, data: bytes) -> None:
    TARGETS[name](data)


@settings(max_examples=200)
@given(data=st.data())
def test_requests_of_which_some_are_wrong(data: st.DataObject) -> None:
    stream = b"".join(data.draw(st.lists(requests(), min_size=1, max_size=3)))
    check_http1(stream, data.draw(cut(stream)))


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_requests(data: st.DataObject) -> None:
    stream = bytearray(b"POST /a HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    stream += b"PUT /c HTTP/1.1\r\nHost: d\r\nContent-Length: 4\r\n\r\nefghGET / HTTP/1.1\r\nHost: i\r\n\r\n"
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.sampled_from(b"\r\n\0 :;09aAzZ\x80\xff"))
    check_http1(bytes(stream), data.draw(cut(bytes(stream))))


def test_what_is_right_is_answered() -> None:
    stream = b"".join(
        [
            b"GET /a HTTP/1.1\r\nHost: b\r\n\r\n",
            b"POST /a HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: u\r\n\r\n",
            b"POST /a HTTP/1.1\r\nHost: b\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
            b"GET /a HTTP/1.1\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
            b"HEAD /a HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n",
        ]
    )
    written, http = answers([stream])
    assert http.requests == llhttp_requests(stream)
    assert written.count(b"HTTP/1.1 200 OK") == 5
