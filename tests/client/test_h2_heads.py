"""Heads of answers, remembered while the dynamic table stays as it is, in pieces, padded, broken; and of requests, as
another HPACK implementation reads them."""

from __future__ import annotations

import hpack
import pytest

from modelserver.client.h2_heads import MAX_HEAD_BYTES, AnswerReader, RequestBlocks, unpadded
from modelserver.wire.http2.frame import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    ConnectionFault,
)

END = [(b"grpc-status", b"5"), (b"grpc-message", b"no")]


def test_a_block_that_changes_no_table_is_known_afterwards() -> None:
    reader, encoder = AnswerReader(), hpack.Encoder()
    inserting = encoder.encode(END)
    head = reader.read(inserting)
    assert (head.http_status, head.grpc_status, head.grpc_message) == (None, 5, b"no")
    assert not reader.known
    indexed = encoder.encode(END)
    found = reader.read(indexed)
    assert reader.known == {indexed: found}
    # What an index means has changed: nothing is known any more.
    reader.read(encoder.encode([(b"grpc-status", b"6")]))
    assert not reader.known
    assert reader.read(encoder.encode(END)).grpc_status == 5


def test_a_head_in_pieces() -> None:
    reader = AnswerReader()
    block = hpack.Encoder().encode(END)
    padded = bytes([3, *bytes(5)]) + block[:4] + bytes(3)
    assert reader.read_part(HEADERS, END_STREAM | PADDED | HAS_PRIORITY, 7, padded) is None
    assert reader.read_part(CONTINUATION, 0, 7, block[4:6]) is None
    complete = reader.read_part(CONTINUATION, END_HEADERS, 7, block[6:])
    assert complete is not None
    assert (complete[0].grpc_status, complete[1]) == (5, True)
    with pytest.raises(ConnectionFault, match="continues nothing"):
        reader.read_part(CONTINUATION, END_HEADERS, 7, block)


def test_what_cannot_be_read() -> None:
    reader = AnswerReader()
    with pytest.raises(ConnectionFault):
        reader.read(b"\xff\xff\xff\xff\xff\xff\xff")
    with pytest.raises(ConnectionFault, match="without the length"):
        unpadded(PADDED, b"")
    assert reader.read_part(HEADERS, 0, 1, b"") is None
    with pytest.raises(ConnectionFault, match="continues nothing"):
        reader.read_part(CONTINUATION, 0, 3, b"")
    with pytest.raises(ConnectionFault, match="a head of more than"):
        reader.read_part(CONTINUATION, 0, 1, bytes(MAX_HEAD_BYTES + 1))


FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"localhost:8001"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)


def decoded(decoder: hpack.Decoder, block: bytes) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 300, 4000, 5000])
def test_blocks_say_the_fields_in_order_again_and_again(has_table: bool, num_bytes: int) -> None:
    fields = (*FIELDS, (b"x-long", b"v" * num_bytes))
    blocks = RequestBlocks(fields, has_table=has_table)
    decoder = hpack.Decoder()
    assert decoded(decoder, blocks.first) == list(fields)
    for _ in range(3):
        assert decoded(decoder, blocks.again) == list(fields)


def test_repeated_heads_are_a_few_indexes() -> None:
    assert len(RequestBlocks(FIELDS).again) == len(FIELDS)


def test_many_fields_of_a_head_have_indexes_of_two_bytes() -> None:
    fields = [(b"x-%d" % number, b"") for number in range(100)]
    blocks, decoder = RequestBlocks(fields), hpack.Decoder()
    assert decoded(decoder, blocks.first) == decoded(decoder, blocks.again) == fields
    assert len(blocks.again) < 2 * len(fields)
