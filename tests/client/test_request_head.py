"""Request heads as another HPACK implementation reads them."""

from __future__ import annotations

import hpack
import pytest

from modelserver.client.h2_outgoing import RequestHead

FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"localhost:8001"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"x-long", b"v" * 300),
)


def decoded(decoder: hpack.Decoder, block: bytes) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]


@pytest.mark.parametrize("table_bytes", [0, 100, 600, 4096, 65536])
def test_blocks_say_the_fields_in_order_again_and_again(table_bytes: int) -> None:
    head = RequestHead(FIELDS, table_bytes=table_bytes)
    decoder = hpack.Decoder()
    assert decoded(decoder, head.first) == list(FIELDS)
    for _ in range(3):
        assert decoded(decoder, head.again) == list(FIELDS)


def test_repeated_heads_are_a_few_indexes() -> None:
    assert len(RequestHead(FIELDS).again) == len(FIELDS)


def test_a_small_table_is_not_used() -> None:
    head = RequestHead(FIELDS, table_bytes=100)
    # It begins by saying so: a table of 100 bytes (RFC 7541, 6.3).
    assert head.first[:2] == b"\x3f\x45"
    assert len(head.again) > 300
