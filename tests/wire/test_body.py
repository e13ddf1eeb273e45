from __future__ import annotations

import numpy as np
import pytest

from modelserver.errors import PayloadTooLargeError
from modelserver.wire.body import BodyCollector


@pytest.mark.parametrize("content_length", [None, 6], ids=["chunked", "announced"])
@pytest.mark.parametrize("chunks", [[b"abcdef"], [b"ab", b"cdef"], [b"", b"abc", b"", b"def"]])
def test_pieces_become_one_body(content_length: int | None, chunks: list[bytes]) -> None:
    collector = BodyCollector(content_length, 0, 6)
    for chunk in chunks:
        collector.add(chunk)
    assert not collector.is_complete
    collector.finish()
    assert collector.is_complete
    assert bytes(collector.body()) == b"abcdef"


@pytest.mark.parametrize("header_length", [0, 1, 63, 64, 137])
def test_what_follows_the_header_is_aligned(header_length: int) -> None:
    collector = BodyCollector(500, header_length, 1000)
    collector.add(bytes(200))
    collector.add(bytes(300))
    body = collector.body()
    assert len(body) == 500
    assert np.frombuffer(body, np.uint8)[header_length:].ctypes.data % 64 == 0


def test_an_announced_body_over_the_limit_is_refused_before_a_byte_of_it() -> None:
    assert BodyCollector(10, 0, 10).error is None
    error = BodyCollector(11, 0, 10).error
    assert isinstance(error, PayloadTooLargeError)
    assert "--http-max-input-size" in error.message


def test_a_chunked_body_is_counted_as_it_comes() -> None:
    collector = BodyCollector(None, 0, 10)
    collector.add(bytes(10))
    assert collector.error is None
    collector.add(b"x")
    assert "over the limit of 10 bytes" in str(collector.error)


def test_a_refused_body_holds_no_memory() -> None:
    collector = BodyCollector(None, 0, 10)
    for _ in range(100):
        collector.add(bytes(10))
    assert collector.body() == b""
