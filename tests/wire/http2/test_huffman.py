"""The Huffman code of RFC 7541 against the `hpack` package, and what is no string in it."""

from __future__ import annotations

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from modelserver.wire.http2.hpack_tables import CODE_LENGTHS, HuffmanError, codes, decode

ENCODER = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


def test_the_code_is_that_of_the_hpack_package() -> None:
    assert tuple(REQUEST_CODES_LENGTH) == CODE_LENGTHS
    assert codes() == list(REQUEST_CODES)


@given(st.binary(max_size=300))
def test_what_was_encoded_is_decoded(text: bytes) -> None:
    assert decode(ENCODER.encode(text)) == text


@pytest.mark.parametrize("byte", range(256))
def test_each_byte_alone_and_repeated(byte: int) -> None:
    for count in (1, 2, 7, 8):
        assert decode(ENCODER.encode(bytes((byte,)) * count)) == bytes((byte,)) * count


@given(st.binary(max_size=40))
def test_any_bytes_are_a_string_of_one_encoding_or_an_error(data: bytes) -> None:
    try:
        text = decode(data)
    except HuffmanError:
        return
    assert ENCODER.encode(text) == data


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x1f\xff", b"\xff\xff\xff\xff", b"\xff\xff\xff\xfc", b"\x00", b"\x1e", b"\x18"]
)
def test_wrong_padding_and_the_end_symbol_are_errors(data: bytes) -> None:
    with pytest.raises(HuffmanError):
        decode(data)
