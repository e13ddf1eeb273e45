"""Compressed messages: what is accepted, what is refused, and what they may cost."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.protocol.call import RpcError
from modelserver.wire.http2.grpc_compression import (
    belongs_off_loop,
    check_encoding,
    choose_encoding,
    compress,
    decompress,
    decompress_on_loop,
)

MIB = 1 << 20
LARGE = 1 << 31
COMPRESSORS = {b"gzip": gzip.compress, b"deflate": zlib.compress}


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
@pytest.mark.parametrize("level", ["low", "medium", "high"])
def test_messages_are_read_back(encoding: bytes, level: str) -> None:
    compressed = compress([b"head", memoryview(bytes(3 * MIB)), bytearray(b"tail")], encoding, level)
    assert len(compressed) < 20_000
    assert decompress(compressed, encoding, LARGE) == b"head" + bytes(3 * MIB) + b"tail"


@given(st.binary(max_size=1000), st.sampled_from([b"gzip", b"deflate"]))
def test_what_others_compress_is_understood(message: bytes, encoding: bytes) -> None:
    compressed = COMPRESSORS[encoding](message)
    assert decompress(memoryview(compressed), encoding, len(message)) == message
    assert decompress_on_loop(compressed, encoding, LARGE) == message


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_message_over_the_limit_is_refused(encoding: bytes) -> None:
    compressed = COMPRESSORS[encoding](bytes(1000))
    assert decompress(compressed, encoding, 1000) == bytes(1000)
    for function in (decompress, decompress_on_loop):
        with pytest.raises(RpcError, match="larger than 999 bytes") as caught:
            function(compressed, encoding, 999)
        assert caught.value.status == 8


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_bomb_costs_no_more_than_the_limit(encoding: bytes) -> None:
    compressed = COMPRESSORS[encoding](bytes(64 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(RpcError) as caught:
            decompress(compressed, encoding, 4 * MIB)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 8
    assert peak_bytes < 6 * MIB


def test_a_small_bomb_leaves_the_event_loop() -> None:
    compressed = zlib.compress(bytes(2 * MIB))
    assert not belongs_off_loop(len(compressed))
    assert decompress_on_loop(compressed, b"deflate", LARGE) is None
    assert decompress(compressed, b"deflate", LARGE) == bytes(2 * MIB)


def test_a_large_message_leaves_the_event_loop() -> None:
    assert not belongs_off_loop(16 * 1024)
    assert belongs_off_loop(16 * 1024 + 1)
    assert decompress_on_loop(bytes(17_000), b"gzip", LARGE) is None


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "ends too early"),
        (lambda data: b"", "ends too early"),
        (lambda data: data[:5] + b"\xff" * 20, "is not valid|ends too early"),
        (lambda data: b"no compressed data", "is not valid"),
        (lambda data: data[:-4] + bytes(4), "is not valid"),
        (lambda data: data + b"more", "bytes after its end"),
    ],
)
def test_broken_data_is_refused(encoding: bytes, damage, message: str) -> None:
    with pytest.raises(RpcError, match=message) as caught:
        decompress(damage(COMPRESSORS[encoding](b"a message")), encoding, LARGE)
    assert caught.value.status == 13


@given(st.binary(max_size=200), st.sampled_from([b"gzip", b"deflate"]))
def test_any_bytes_are_a_message_or_refused(data: bytes, encoding: bytes) -> None:
    for beginning in (b"", COMPRESSORS[encoding](b"")[:10]):
        try:
            assert decompress(beginning + data, encoding, 10_000) is not None
        except RpcError as error:
            assert error.status in {8, 13}  # noqa: PT017 - either is right, and no other error


@pytest.mark.parametrize(
    ("encoding", "status"), [(b"", 13), (b"identity", 13), (b"br", 12), (b"GZIP", 12), (b"\xff" * 5000, 12)]
)
def test_a_marked_message_needs_a_known_encoding(encoding: bytes, status: int) -> None:
    for function in (decompress, decompress_on_loop):
        with pytest.raises(RpcError) as caught:
            function(b"message", encoding, LARGE)
        assert caught.value.status == status
        assert len(caught.value.message) < 200
    with pytest.raises(RpcError):
        check_encoding(encoding)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ((), None),
        ((b"identity",), None),
        ((b"br",), None),
        ((b"identity", b"deflate", b"gzip"), b"gzip"),
        ((b"deflate",), b"deflate"),
    ],
)
def test_the_encoding_of_answers(accepted: tuple[bytes, ...], encoding: bytes | None) -> None:
    assert choose_encoding(accepted) == encoding
