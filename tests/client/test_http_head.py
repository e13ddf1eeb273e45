"""Heads of answers, chunks, and what failures say."""

from __future__ import annotations

import pytest

from modelserver.client.heads import AnswerHead, ChunkedBody, MalformedAnswerError, failure_text


@pytest.mark.parametrize(
    ("raw", "status", "length", "is_chunked", "is_last", "json_len"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 12", 200, 12, False, False, None),
        (b"HTTP/1.1 200 OK\r\ncontent-length:3\r\nInference-Header-Content-Length: 2", 200, 3, False, False, 2),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", 200, None, True, False, None),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close", 400, 0, False, True, None),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1", 200, 1, False, True, None),
        (b"HTTP/1.1 200 OK", 200, None, False, True, None),
        (b"HTTP/1.1 204 No Content", 204, 0, False, False, None),
        (b"HTTP/1.1 100 Continue", 100, 0, False, False, None),
    ],
)
def test_heads(
    raw: bytes, status: int, length: int | None, is_chunked: bool, is_last: bool, json_len: int | None
) -> None:
    head = AnswerHead(raw + b"\r\n\r\n")
    assert (head.status, head.length, head.is_chunked, head.is_last, head.json_len) == (
        status,
        length,
        is_chunked,
        is_last,
        json_len,
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PRI * HTTP/2.0",
        b"HTTP/1.1 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 " + b"9" * 5000,
        b"HTTP/1.1 200 OK\r\nContent-Length: x",
        b"HTTP/1.1 200 OK\r\nTwo Words: x",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
    ],
)
def test_what_is_no_head(raw: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        AnswerHead(raw + b"\r\n\r\n")


def test_fields_of_the_connection_alone_are_not_passed_on() -> None:
    raw = b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive, X-Hop\r\nX-Hop: 1\r\nX-Own: 2\r\nContent-Length: 0\r\n\r\n"
    assert AnswerHead(raw).headers == (("X-Own", "2"),)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_chunks_cut_anyhow(step: int) -> None:
    body = ChunkedBody()
    raw = b"4\r\nWiki\r\n6;x=y\r\npedia \r\nB\r\nin \r\nchunks\r\n0\r\nTrailer: t\r\n\r\n"
    found = b"".join(body.feed(raw[at : at + step]) for at in range(0, len(raw), step))
    assert found == b"Wikipedia in \r\nchunks"
    assert body.is_done


@pytest.mark.parametrize(
    "raw",
    [
        b"zz\r\n",
        b"\r\n",
        b"-6\r\n",  # once sent the reader back for ever
        b"0x2\r\n{}\r\n",
        b"2_0\r\n",
        b"1" * 17 + b"\r\n",
        b"2\r\n{}XX0\r\n\r\n",
        b"2\r\n{}\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n",
        b"2;" + b"x" * 20_000,
        b"0\r\n" + b"trailer: t\r\n" * 2000,
    ],
)
def test_chunks_that_are_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        ChunkedBody().feed(raw)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "no such model"}', "HTTP 404: no such model"),
        (b'{"error": {"message": "too long"}}', "HTTP 404: too long"),
        (b"plain words", "HTTP 404: plain words"),
        (b"[1]", "HTTP 404: [1]"),
    ],
)
def test_failures_say_what_the_server_says(body: bytes, text: str) -> None:
    assert failure_text(404, body) == text
