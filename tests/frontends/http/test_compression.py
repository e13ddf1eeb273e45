from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from functools import partial

import pytest

from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, UnsupportedError
from modelserver.protocol.compression import choose_encoding, compress, decompress

# Without the time, so that the parameters of tests are the same in every process.
_gzip = partial(gzip.compress, mtime=0)
TEXT = b"a tensor, " * 1000


def _raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", _gzip(TEXT)),
        (" GZIP", _gzip(TEXT)),
        ("gzip", _gzip(TEXT[:5000]) + _gzip(TEXT[5000:])),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", _raw_deflate(TEXT)),
        ("identity", TEXT),
        ("", TEXT),
    ],
)
def test_decompresses(encoding: str, body: bytes) -> None:
    assert bytes(decompress(memoryview(body), encoding, len(TEXT))) == TEXT


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, deflate", "x-gzip"])
def test_other_encodings_are_unsupported(encoding: str) -> None:
    with pytest.raises(UnsupportedError, match="gzip, deflate"):
        decompress(b"x", encoding, 100)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b""),
        ("gzip", b"not gzip at all"),
        ("gzip", _gzip(TEXT)[:-1]),
        ("gzip", _gzip(TEXT)[:20]),
        ("gzip", _gzip(TEXT) + b"rest"),
        ("gzip", zlib.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)[:-1]),
        ("deflate", zlib.compress(TEXT) + b"rest"),
        ("deflate", b"\xff\xff\xff"),
    ],
)
def test_broken_bodies_are_the_client_s_fault(encoding: str, body: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=encoding):
        decompress(body, encoding, 1 << 20)


@pytest.mark.parametrize(("encoding", "packed"), [("gzip", _gzip(TEXT)), ("deflate", zlib.compress(TEXT))])
def test_the_limit_is_on_what_comes_out(encoding: str, packed: bytes) -> None:
    assert len(decompress(packed, encoding, len(TEXT))) == len(TEXT)
    with pytest.raises(PayloadTooLargeError, match="--http-max-input-size"):
        decompress(packed, encoding, len(TEXT) - 1)


@pytest.mark.parametrize("size", [(1 << 18) + more for more in (-1, 0, 1, 2, 257, 258, 259, 1 << 18, 3 << 18)])
@pytest.mark.parametrize("pack", [_gzip, zlib.compress, _raw_deflate])
def test_what_unpacks_to_many_times_its_size_is_whole(pack: Callable[[bytes], bytes], size: int) -> None:
    encoding = "gzip" if pack is _gzip else "deflate"
    assert bytes(decompress(pack(bytes(size)), encoding, size)) == bytes(size)
    with pytest.raises(PayloadTooLargeError):
        decompress(pack(bytes(size)), encoding, size - 1)
    with pytest.raises(InvalidArgumentError, match="ends too early"):
        decompress(pack(bytes(size))[:-1], encoding, size)


def test_a_bomb_of_many_members_is_stopped() -> None:
    with pytest.raises(PayloadTooLargeError):
        decompress(_gzip(bytes(1 << 16)) * 100, "gzip", 1 << 20)


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_compresses_many_buffers_into_one_body(encoding: str, unpack) -> None:
    assert unpack(compress((b"head", memoryview(TEXT), b""), encoding)) == b"head" + TEXT


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip;q=0.5", "deflate"),
        ("gzip;q=0.5, identity", None),
        ("gzip;q=0", None),
        ("GZIP ; q=0.1", "gzip"),
        ("br, zstd", None),
        ("br, gzip;q=0.2, *;q=0.1", "gzip"),
        ("gzip;q=nonsense", None),
        ("identity;q=0, deflate;q=0.3", "deflate"),
        ("*", None),
        (",,;", None),
    ],
)
def test_chooses_by_weight(accept: str, expected: str | None) -> None:
    assert choose_encoding(accept) == expected
