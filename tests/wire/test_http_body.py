from __future__ import annotations

import numpy as np
import pytest

from modelserver.errors import PayloadTooLargeError
from modelserver.wire.http_body import BodyCollector


@pytest.mark.parametrize("content_length", [None, 6], ids=["chunked", "announced"])
@pytest.mark.parametrize("chunks", [[b"abcdef"], [b"ab", b"cdef"], [b"", b"abc", b"", b"def"]])
def test_pieces_become_one_body(content_length: int | None, chunks: list[bytes]) -> None:
    collector = BodyCollector(content_length, 0, 6)
    for chunk in chunks:
        collector.add(chunk)
    assert bytes(collector.finish()) == b"abcdef"


@pytest.mark.parametrize("header_length", [0, 1, 63, 64, 137])
def test_what_follows_the_header_is_aligned(header_length: int) -> None:
    collector = BodyCollector(500, header_length, 1000)
    collector.add(bytes(200))
    collector.add(bytes(300))
    body = collector.finish()
    assert len(body) == 500
    assert np.frombuffer(body, np.uint8)[header_length:].ctypes.data % 64 == 0


def test_an_announced_body_over_the_limit_is_refused_before_a_byte_of_it() -> None:
    BodyCollector(10, 0, 10)
    with pytest.raises(PayloadTooLargeError, match="--http-max-input-size"):
        BodyCollector(11, 0, 10)


def test_a_chunked_body_is_counted_as_it_comes() -> None:
    collector = BodyCollector(None, 0, 10)
    collector.add(bytes(10))
    with pytest.raises(PayloadTooLargeError, match="over the limit of 10 bytes"):
        collector.add(b"x")
