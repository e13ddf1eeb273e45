"""The decoder against the `hpack` package: its encoder's blocks, and its decoder's verdict on broken ones."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelserver.wire.http2.hpack import Decoder, HpackError
from modelserver.wire.http2.hpack_tables import STATIC_TABLE, Field

# Names and values that repeat, so that tables are used, and some that do not.
NAMES = st.sampled_from([b"a", b"grpc-timeout", b"x-long-name-of-a-field"]) | st.binary(max_size=60)
VALUES = st.sampled_from([b"", b"1", b"trailers", b"x" * 300]) | st.binary(max_size=200)
FIELDS = st.sampled_from(STATIC_TABLE) | st.tuples(NAMES, VALUES)
SECRET = st.booleans()
LISTS = st.lists(st.tuples(FIELDS, SECRET), max_size=12)
TABLE_SIZES = st.none() | st.integers(0, 4096)
BLOCKS = st.lists(st.tuples(LISTS, TABLE_SIZES, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=200)
@given(BLOCKS)
def test_blocks_of_the_hpack_package_are_read_back(
    blocks: list[tuple[list[tuple[Field, bool]], int | None, bool]],
) -> None:
    encoder, decoder = hpack.Encoder(), Decoder(1 << 20)
    for fields, table_size, is_huffman in blocks:
        if table_size is not None:
            encoder.header_table_size = table_size
        block = encoder.encode([(name, value, secret) for (name, value), secret in fields], huffman=is_huffman)
        assert decoder.decode(block) == tuple(field for field, _ in fields)
        # The package counts 32 bytes for each entry as we do.
        assert decoder.table_bytes == sum(
            32 + len(name) + len(value) for name, value in encoder.header_table.dynamic_entries
        )


@settings(max_examples=300)
@given(
    fields=st.lists(FIELDS, min_size=1, max_size=6),
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 4) | st.none(),
)
def test_damaged_blocks_have_the_verdict_of_the_hpack_package(
    fields: list[Field], flips: list[tuple[int, int]], cut: int | None
) -> None:
    encoder, ours, theirs = hpack.Encoder(), Decoder(1 << 20), hpack.Decoder(1 << 20)
    first = encoder.encode(fields)
    block = bytearray(encoder.encode([*fields, (b"new", b"field")]))
    for position, value in flips:
        block[position % len(block)] = value
    damaged = bytes(block[: len(block) - (cut or 0)])
    ours.decode(first)
    theirs.decode(first, raw=True)
    try:
        expected = tuple((bytes(name), bytes(value)) for name, value in theirs.decode(damaged, raw=True))
    except hpack.HPACKError:
        with pytest.raises(HpackError):
            ours.decode(damaged)
    else:
        assert ours.decode(damaged) == expected
