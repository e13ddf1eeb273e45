"""Heads of answers: remembered while the dynamic table stays as it is, in pieces, padded, broken."""

from __future__ import annotations

import hpack
import pytest

from modelserver.client.h2_incoming import MAX_HEAD_BYTES, Head, HeadReader, unpadded
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
    reader, encoder = HeadReader(Head), hpack.Encoder()
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
    reader = HeadReader(Head)
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
    reader = HeadReader(Head)
    with pytest.raises(ConnectionFault):
        reader.read(b"\xff\xff\xff\xff\xff\xff\xff")
    with pytest.raises(ConnectionFault, match="without the length"):
        unpadded(PADDED, b"")
    assert reader.read_part(HEADERS, 0, 1, b"") is None
    with pytest.raises(ConnectionFault, match="continues nothing"):
        reader.read_part(CONTINUATION, 0, 3, b"")
    with pytest.raises(ConnectionFault, match="a head of more than"):
        reader.read_part(CONTINUATION, 0, 1, bytes(MAX_HEAD_BYTES + 1))
