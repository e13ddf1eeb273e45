from __future__ import annotations

import contextlib
from typing import Any

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelserver.errors import PayloadTooLargeError
from modelserver.wire.body import BodyCollector
from modelserver.wire.http1.head import RefusedError
from modelserver.wire.http1.incoming_body import (
    MAX_CHUNKS_PER_TURN,
    MAX_EXTENSION_BYTES,
    MAX_TINY_CHUNKS,
    MAX_TRAILER_BYTES,
    MAX_TRAILERS,
    ChunkedBody,
)

HEAD = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT = 1 << 20


def _read(pieces: list[bytes], limit: int = LIMIT) -> tuple[bytes | str, bytes]:
    """The body, or why there is none; and what follows it."""
    chunked = ChunkedBody(BodyCollector(None, 0, limit))
    rest = b""
    for number, piece in enumerate(pieces):
        at, before = 0, -1
        try:
            while before < at < len(piece) and not chunked.is_complete and chunked.body.error is None:
                before, at = at, chunked.feed(piece, at)
        except RefusedError as refused:
            return f"{refused.status} {refused.message}", b""
        if chunked.body.error is not None:
            return str(chunked.body.error), b""
        if chunked.is_complete:
            rest = piece[at:] + b"".join(pieces[number + 1 :])
            break
    return (bytes(chunked.body.body()) if chunked.is_complete else "incomplete"), rest


def _bytewise(data: bytes) -> list[bytes]:
    return [bytes((byte,)) for byte in data]


def test_chunks_become_a_body() -> None:
    data = b"3\r\nabc\r\n0A;x=y\r\n0123456789\r\n0\r\nX: y\r\n\r\nrest"
    assert _read([data]) == (b"abc0123456789", b"rest")
    assert _read(_bytewise(data)) == (b"abc0123456789", b"rest")


class _Llhttp:
    """What llhttp makes of a chunked body."""

    def __init__(self) -> None:
        self.body = b""
        self.is_complete = False

    def on_body(self, piece: bytes) -> None:
        if not self.is_complete:
            self.body += piece

    def on_message_complete(self) -> None:
        self.is_complete = True


def _llhttp(data: bytes) -> bytes | None:
    found = _Llhttp()
    parser = httptools.HttpRequestParser(found)
    parser.feed_data(HEAD)
    with contextlib.suppress(httptools.HttpParserError):
        parser.feed_data(data)
    return found.body if found.is_complete else None


_PARTS = st.sampled_from(
    [
        *(
            b"3\r\nabc\r\n",
            b"3;x=y\r\nabc\r\n",
            b"0\r\n\r\n",
            b"0\r\nX: y\r\n\r\n",
            b"a\r\n0123456789\r\n",
            b"00003\r\nabc\r\n",
        ),
        *(b"\r\n", b"\n", b"\r", b"0", b"3", b";", b" ", b"\t", b"abc", b"x", b"g", b"-", b"+", b"0x3", b"\0", b"\x80"),
        *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"X", b":", b'"'),
    ]
)


@given(st.lists(_PARTS, max_size=8).map(b"".join))
@example(b"0\r\nHost: x\r\n\r\n")
def test_nothing_is_read_that_llhttp_reads_otherwise(data: bytes) -> None:
    """Stricter than llhttp we may be."""
    body, rest = _read([data])
    if isinstance(body, bytes):
        assert _llhttp(data[: len(data) - len(rest)]) == body
        assert _llhttp(data[: len(data) - len(rest) - 1]) is None, "the body ended earlier"


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.data())
def test_what_clients_send_is_read(chunks: list[bytes], draw: Any) -> None:
    data = b"".join([b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]) + b"0\r\n\r\n"
    assert _read([data]) == (b"".join(chunks), b"")
    cut = draw.draw(st.integers(0, len(data)))
    assert _read([data[:cut], data[cut:]]) == (b"".join(chunks), b"")


@given(st.lists(_PARTS, max_size=8).map(b"".join))
def test_how_it_is_cut_changes_nothing(data: bytes) -> None:
    assert _read(_bytewise(data)) == _read([data])


@pytest.mark.parametrize(
    ("data", "is_borne"),
    [
        (b"1;%s\r\na\r\n0\r\n\r\n" % (b"x" * (MAX_EXTENSION_BYTES - 1)), True),
        (b"1;%s\r\na\r\n0;\r\n\r\n" % (b"x" * (MAX_EXTENSION_BYTES - 1)), False),
        (b"1;%s\r\n\r\na\r\n0\r\n\r\n" % (b"x" * (MAX_EXTENSION_BYTES + 20)), False),
        (b"0\r\nX:%s\r\n\r\n" % (b"x" * (MAX_TRAILER_BYTES - 2)), True),
        (b"0\r\nX:%s\r\n\r\n" % (b"x" * (MAX_TRAILER_BYTES - 1)), False),
        (b"0\r\n" + b"X:%s\r\n" % (b"y" * 1000) * (MAX_TRAILER_BYTES // 1000 + 1) + b"\r\n", False),
        (b"0\r\n" + b"X:y\r\n" * MAX_TRAILERS + b"\r\n", True),
        (b"0\r\n" + b"X:y\r\n" * (MAX_TRAILERS + 1) + b"\r\n", False),
    ],
)
def test_what_is_beside_the_body_has_limits(data: bytes, is_borne: bool) -> None:
    body, _ = _read([data], limit=1 << 30)
    assert isinstance(body, bytes) is is_borne
    assert _read(_bytewise(data), limit=1 << 30) == (body, b"")


@pytest.mark.parametrize(
    ("num_chunks", "size", "is_borne"),
    [
        (MAX_TINY_CHUNKS, 1, True),
        (MAX_TINY_CHUNKS + 1, 1, False),
        (MAX_TINY_CHUNKS + 1, 63, False),
        (MAX_TINY_CHUNKS + 100, 64, True),
    ],
)
@pytest.mark.parametrize("piece", [997, 1 << 30])
def test_small_chunks_have_a_limit(num_chunks: int, size: int, is_borne: bool, piece: int) -> None:
    data = b"%x\r\n%s\r\n" % (size, b"a" * size) * num_chunks + b"0\r\n\r\n"
    body, _ = _read([data[at : at + piece] for at in range(0, len(data), piece)], limit=1 << 30)
    if is_borne:
        assert body == b"a" * size * num_chunks
    else:
        assert str(body).startswith(
            f"400 Chunked request body exceeds maximum of {MAX_TINY_CHUNKS} non-empty chunks. Send fewer or larger "
            "HTTP chunks."
        )


@pytest.mark.parametrize("start", [b"", b"1;", b"0\r\nX: "])
def test_lines_that_never_end_are_cut_off(start: bytes) -> None:
    assert str(_read([start, *[b"1" * 1000] * 100])[0])[:3] in ("400", "431")


def test_a_chunk_over_the_limit_is_refused_before_its_data() -> None:
    chunked = ChunkedBody(BodyCollector(None, 0, 10))
    chunked.feed(b"6\r\n123456\r\n", 0)
    assert chunked.body.error is None
    chunked.feed(b"5\r\n", 0)
    assert isinstance(chunked.body.error, PayloadTooLargeError)


@pytest.mark.parametrize("chunk", [b"1\r\na\r\n", b"1;x\r\na\r\n", b"1001\r\n%s\r\n" % (b"a" * 4097)])
def test_a_turn_has_a_number_of_chunks(chunk: bytes) -> None:
    chunked = ChunkedBody(BodyCollector(None, 0, 1 << 30))
    data = chunk * 2 * MAX_CHUNKS_PER_TURN + b"0\r\n\r\n"
    assert chunked.feed(data, 0) == len(chunk) * MAX_CHUNKS_PER_TURN
    assert chunked.feed(data, len(chunk) * MAX_CHUNKS_PER_TURN) == 2 * len(chunk) * MAX_CHUNKS_PER_TURN
    assert chunked.feed(data, 2 * len(chunk) * MAX_CHUNKS_PER_TURN) == len(data)
    assert chunked.is_complete
