"""What header blocks lead to, and that remembered ones lead to the same."""

from __future__ import annotations

import hpack
import pytest
from support.http2_frames import ErrorCode, FrameType, continuation, data, headers, rst_stream
from support.memory_http2 import MemoryPeer, until
from support.raw_http2 import call_fields, prefixed

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.receiver import Receiver
from modelserver.wire.limits import HeadLimits, Http2Limits, WireLimits


def known(peer: MemoryPeer) -> int:
    receiver: Receiver = peer.connection.receiver
    return len(receiver._admission.known)


async def test_equal_blocks_share_their_route() -> None:
    peer = MemoryPeer()
    for stream_id in (1, 3, 5):
        peer.call(stream_id, "Metadata", b"", ("x-key", "same"))
    assert known(peer) == 1
    assert all(b'"same"' in peer.answer(stream_id).messages[0] for stream_id in (1, 3, 5))


async def test_blocks_that_change_the_table_are_not_remembered() -> None:
    """An indexed block means other fields after the table has changed: a remembered route would be somebody else's."""
    peer, encoder = MemoryPeer(), hpack.Encoder()

    def call(stream_id: int, user: str) -> bytes:
        block = encoder.encode([*call_fields("Metadata"), ("x-user", user)])
        peer.send(headers(stream_id, block, end=False), data(stream_id, prefixed(b""), end=True))
        return peer.answer(stream_id).messages[0]

    assert b'"ann"' in call(1, "ann")
    assert known(peer) == 0
    assert b'"ann"' in call(3, "ann")
    assert known(peer) == 1
    first = encoder.encode([*call_fields("Metadata"), ("x-user", "ann")])
    assert b'"bob"' in call(5, "bob")
    assert known(peer) == 0
    # The same bytes as for stream 3 now mean the entries that moved there.
    peer.send(headers(7, first, end=False), data(7, prefixed(b""), end=True))
    assert b'"ann"' not in bytes(peer.answer(7).body)


async def test_few_and_short_blocks_are_remembered() -> None:
    peer = MemoryPeer()
    for index in range(200):
        peer.call(2 * index + 1, "Echo", b"", ("x-index", str(index)))
    assert 0 < known(peer) <= 64
    before = known(peer)
    peer.call(401, "Echo", b"", ("x-long", "v" * 600))
    assert known(peer) == before


async def test_refusals_are_not_remembered() -> None:
    peer = MemoryPeer()
    peer.call(1, "Nothing")
    assert known(peer) == 0
    assert peer.answer(1).grpc_status == 12


async def test_a_stream_over_the_limit_is_refused_and_its_block_decoded() -> None:
    peer, encoder = MemoryPeer(WireLimits(http2=Http2Limits(max_concurrent_streams=1))), hpack.Encoder()
    peer.send(headers(1, encoder.encode(call_fields("Echo")), end=False))
    peer.send(headers(3, encoder.encode([*call_fields("Metadata"), ("x-new", "entry")]), end=False))
    assert peer.resets == {3: ErrorCode.REFUSED_STREAM}
    peer.send(data(1, prefixed(b"x"), end=True))
    block = encoder.encode([*call_fields("Metadata"), ("x-new", "entry")])
    peer.send(headers(5, block, end=False), data(5, prefixed(b""), end=True))
    assert b'"entry"' in peer.answer(5).messages[0]
    assert peer.violations == {Violation.TOO_MANY_STREAMS: 1}


async def test_calls_that_were_reset_count_until_their_handlers_are_done() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(max_concurrent_streams=2)))
    for stream_id in (1, 3):
        peer.call(stream_id, "Hold")
    calls = list(peer.grpc.held)
    peer.send(rst_stream(1), rst_stream(3))
    peer.call(5, "Echo", b"x")
    assert peer.resets == {5: ErrorCode.REFUSED_STREAM}
    for call in calls:
        call.reply((b"late",))
    peer.call(7, "Echo", b"x")
    assert peer.answer(7).messages == [b"x"]


async def test_a_malformed_request_resets_its_stream_only() -> None:
    peer = MemoryPeer()
    peer.send(headers(1, [*call_fields("Echo"), ("Upper", "case")], end=False), data(1, b"ignored", end=True))
    assert peer.resets == {1: ErrorCode.PROTOCOL_ERROR}
    peer.call(3, "Echo", b"x")
    assert peer.answer(3).messages == [b"x"]


async def test_a_head_over_the_limit_is_answered_for_both_kinds_of_clients() -> None:
    peer = MemoryPeer(WireLimits(head=HeadLimits(max_http2_list_bytes=1000)))
    peer.send(headers(1, [*call_fields("Echo"), ("x-large", "v" * 1000)]))
    answer = peer.answer(1)
    assert (answer.status, answer.grpc_status) == (431, 8)
    assert peer.violations == {Violation.HEAD_TOO_LARGE: 1}
    peer.call(3, "Echo", b"x")
    assert peer.answer(3).messages == [b"x"]


async def test_a_broken_block_ends_the_connection() -> None:
    peer = MemoryPeer()
    peer.send(headers(1, b"\x80"))
    assert peer.goaways[0][1] == ErrorCode.COMPRESSION_ERROR


@pytest.mark.parametrize(
    ("late", "code"),
    [
        (headers(1, call_fields("Echo")), ErrorCode.STREAM_CLOSED),
        (headers(3, call_fields("Echo")), ErrorCode.PROTOCOL_ERROR),
        (headers(4, call_fields("Echo")), ErrorCode.PROTOCOL_ERROR),
        (headers(0, call_fields("Echo")), ErrorCode.PROTOCOL_ERROR),
    ],
)
async def test_ids_that_do_not_open_a_stream(late: object, code: ErrorCode) -> None:
    peer = MemoryPeer()
    peer.call(1, "Echo")
    peer.call(5, "Echo")
    peer.send(late)  # type: ignore[arg-type]
    assert peer.goaways[0][1] == code


async def test_trailers_end_a_request() -> None:
    peer = MemoryPeer()
    peer.open(1, "Echo")
    peer.send(data(1, prefixed(b"x")), headers(1, b"", end_headers=False), continuation(1))
    assert peer.answer(1).messages == [b"x"]


@pytest.mark.parametrize("end", [True, False])
async def test_trailers_that_are_wrong(end: bool) -> None:
    peer = MemoryPeer()
    peer.open(1, "Echo")
    peer.send(headers(1, [(":path", "/")] if end else [("x", "y")], end=end))
    assert peer.goaways[0][1] == ErrorCode.PROTOCOL_ERROR


async def test_headers_in_flight_to_a_stream_that_we_reset_are_ignored() -> None:
    peer = MemoryPeer()
    peer.open(1, "Nothing")
    peer.send(data(1, b"x"))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}
    peer.send(data(1, b"x"), headers(1, [("x", "y")]))
    assert not peer.of_type(FrameType.GOAWAY)
