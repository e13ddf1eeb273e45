"""The sending half of a connection: flow control, fair turns, few writes."""

from __future__ import annotations

import pytest
from support.http2_frames import FrameType, Setting, data, headers, rst_stream, settings, window_update
from support.memory_http2 import MemoryPeer
from support.raw_http2 import call_fields, prefixed

from modelserver.wire.limits import Http2Limits, WireLimits

KIB, MIB = 1 << 10, 1 << 20


async def test_a_small_answer_is_three_frames_in_one_write() -> None:
    peer = MemoryPeer()
    num_writes = peer.transport.num_writes
    frames = peer.call(1, "Echo", b"hello")
    assert [frame.type for frame in frames] == [FrameType.HEADERS, FrameType.DATA, FrameType.HEADERS]
    assert peer.answer(1).messages == [b"hello"]
    assert peer.transport.num_writes == num_writes + 1


async def test_many_answers_of_one_read_are_one_write() -> None:
    peer = MemoryPeer()
    num_writes = peer.transport.num_writes
    calls = [
        frame
        for index in range(50)
        for frame in (
            headers(2 * index + 1, call_fields("Echo"), end=False),
            data(2 * index + 1, prefixed(b"%d" % index), end=True),
        )
    ]
    peer.send(*calls)
    assert peer.transport.num_writes == num_writes + 1
    assert [peer.answer(2 * index + 1).messages for index in range(50)] == [[b"%d" % index] for index in range(50)]


async def test_many_answers_from_elsewhere_are_one_write() -> None:
    peer = MemoryPeer()
    for index in range(20):
        peer.call(2 * index + 1, "Hold", b"x")
    num_writes = peer.transport.num_writes
    peer.grpc.release()
    await peer.settle()
    assert peer.transport.num_writes == num_writes + 1
    assert all(peer.answer(2 * index + 1).grpc_status == 0 for index in range(20))


async def test_the_window_of_a_stream_is_kept_to() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 1000})
    peer.call(1, "Size", b"5000")
    assert peer.answer(1).data_lengths == [1000]
    peer.send(window_update(1, 1))
    assert peer.answer(1).data_lengths == [1000, 1]
    peer.send(window_update(1, 100_000))
    answer = peer.answer(1)
    assert answer.data_lengths == [1000, 1, 4004]
    assert answer.messages == [bytes(5000)]
    assert answer.grpc_status == 0


async def test_the_window_of_the_connection_is_kept_to() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: MIB})
    peer.call(1, "Size", b"40000")
    peer.call(3, "Size", b"40000")
    assert sum(peer.answer(1).data_lengths + peer.answer(3).data_lengths) == 65_535
    peer.call(5, "Fail", b"9 text")
    assert peer.answer(5).grpc_status == 9
    peer.send(window_update(0, 1))
    assert sum(peer.answer(3).data_lengths) == 65_535 + 1 - 40_005
    peer.send(window_update(0, MIB))
    assert peer.answer(3).messages == [bytes(40_000)]


async def test_a_stalled_stream_holds_up_no_other() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 0})
    peer.call(1, "Size", b"100")
    peer.send(headers(3, call_fields("Size"), end=False), window_update(3, 1000), data(3, prefixed(b"100"), end=True))
    assert peer.answer(3).grpc_status == 0
    assert not peer.answer(1).has_ended


async def test_settings_move_the_windows_of_open_streams_below_zero_and_back() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 1000})
    peer.call(1, "Size", b"3000")
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    peer.send(window_update(1, 999))
    assert peer.answer(1).data_lengths == [1000]
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 2000}))
    assert peer.answer(1).data_lengths == [1000, 1999]
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 2006}))
    assert peer.answer(1).data_lengths == [1000, 1999, 6]
    assert peer.answer(1).grpc_status == 0


@pytest.mark.parametrize(
    ("max_frame", "lengths"), [(16_384, [16_384] * 3 + [848]), (50_000, [50_000]), (49_999, [49_999, 1])]
)
async def test_frames_are_as_large_as_the_peer_lets_them(max_frame: int, lengths: list[int]) -> None:
    peer = MemoryPeer(announces={Setting.MAX_FRAME_SIZE: max_frame})
    peer.call(1, "Size", b"49995")
    assert peer.answer(1).data_lengths == lengths
    assert peer.answer(1).messages == [bytes(49_995)]


async def test_streams_have_their_turns_of_a_quarter_mebibyte() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 4 * MIB, Setting.MAX_FRAME_SIZE: MIB})
    peer.send(window_update(0, 8 * MIB))
    calls = [
        frame
        for stream_id in (1, 3)
        for frame in (
            headers(stream_id, call_fields("Size"), end=False),
            data(stream_id, prefixed(b"%d" % (600 * KIB)), end=True),
        )
    ]
    frames = [frame for frame in peer.send(*calls) if frame.type == FrameType.DATA]
    assert [frame.stream_id for frame in frames] == [1, 3, 1, 3, 1, 3]
    assert [len(frame.payload) for frame in frames[:4]] == [256 * KIB] * 4
    assert peer.answer(1).messages == peer.answer(3).messages == [bytes(600 * KIB)]


async def test_large_answers_are_written_over_several_turns() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 1 << 30, Setting.MAX_FRAME_SIZE: MIB})
    peer.send(window_update(0, 1 << 30))
    peer.call(1, "Size", b"%d" % (7 * MIB))
    first = len(peer.answer(1).body)
    assert 2 * MIB <= first < 3 * MIB
    await peer.settle()
    assert len(peer.answer(1).messages[0]) == 7 * MIB


async def test_a_full_transport_stops_the_making_of_frames() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 1 << 30})
    peer.send(window_update(0, 1 << 30))
    peer.transport.is_slow = True
    peer.connection.pause_writing()
    peer.call(1, "Echo", b"small")
    peer.call(3, "Size", b"%d" % MIB)
    await peer.settle()
    assert not peer.answer(1).data_lengths
    assert not peer.answer(3).data_lengths
    assert peer.connection.sender.num_queued_bytes > MIB
    peer.connection.resume_writing()
    await peer.settle()
    assert peer.answer(1).messages == [b"small"]
    assert peer.answer(3).messages == [bytes(MIB)]
    assert peer.connection.sender.num_queued_bytes == 0


async def test_a_peer_that_takes_nothing_is_read_no_further() -> None:
    peer = MemoryPeer(WireLimits(max_queued_bytes=MIB))
    peer.transport.is_slow = True
    peer.connection.pause_writing()
    peer.call(1, "Size", b"%d" % (2 * MIB))
    assert peer.transport.is_paused
    peer.connection.resume_writing()
    assert not peer.transport.is_paused


async def test_the_first_block_after_a_small_table_says_that_ours_is_empty() -> None:
    peer = MemoryPeer(announces={Setting.HEADER_TABLE_SIZE: 0})
    peer.call(1, "Echo", b"x")
    (first, *_) = peer.of_type(FrameType.HEADERS)
    assert first.payload.startswith(b"\x20")
    peer.call(3, "Echo", b"x")
    assert not any(frame.payload.startswith(b"\x20") for frame in peer.of_type(FrameType.HEADERS))
    assert peer.answer(3).messages == [b"x"]


async def test_an_acknowledgement_comes_after_frames_that_knew_nothing_of_it() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 10_000})
    frames = peer.send(
        headers(1, call_fields("Size"), end=False),
        data(1, prefixed(b"5000"), end=True),
        settings({Setting.INITIAL_WINDOW_SIZE: 0}),
    )
    types = [frame.type for frame in frames]
    assert types.index(FrameType.SETTINGS) > types.index(FrameType.DATA)


async def test_what_is_reset_is_dropped() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 0})
    peer.call(1, "Size", b"100000")
    peer.call(3, "Size", b"100000")
    peer.send(rst_stream(1))
    assert peer.connection.sender.num_queued_bytes == 100_005
    peer.leave()
    assert peer.connection.sender.num_queued_bytes == 0


async def test_long_trailers_go_in_several_frames() -> None:
    """Not that ours are so long; but blocks of any size can be sent."""
    peer = MemoryPeer()
    peer.connection.sender.send_block(1, bytes(40_000))
    peer.connection.flush()
    frames = peer.transport.written
    lengths = []
    at = frames.rfind(b"\x00\x40\x00\x01\x00\x00\x00\x00\x01")
    while at < len(frames):
        length = int.from_bytes(frames[at : at + 3], "big")
        lengths.append((frames[at + 3], frames[at + 4], length))
        at += 9 + length
    assert lengths == [(1, 0, 16_384), (9, 0, 16_384), (9, 4, 7232)]


async def test_window_updates_for_what_was_sent_are_free() -> None:
    """gRPC's core answers each message of a stream with two of them."""
    peer = MemoryPeer(WireLimits(http2=Http2Limits(glitches_burst=100, glitches_per_s=0)))
    peer.open(1, "Chat")
    for _ in range(500):
        peer.send(data(1, prefixed(b"x" * 100)))
        await peer.settle()
        peer.send(window_update(1, 105), window_update(0, 105))
    assert len(peer.answer(1).messages) == 500
    for _ in range(3000):
        peer.send(window_update(0, 1))
    assert peer.transport.is_closing()
    peer.leave()


async def test_window_updates_for_pieces_of_what_was_sent_are_free() -> None:
    """HAProxy gives back what it has read of an answer piece by piece, to the stream and to the connection."""
    peer = MemoryPeer(WireLimits(http2=Http2Limits(glitches_burst=100, glitches_per_s=0)))
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 1 << 24}), window_update(0, 1 << 24))
    peer.call(1, "Size", b"4000000")
    await peer.until_answered(1)
    for _ in range(1000):
        peer.send(window_update(1, 4000), window_update(0, 4000))
    assert not peer.violations
    peer.leave()
