"""Frames, header blocks and bodies out of bytes that come anyhow."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http2_frames import (
    PREFACE,
    ErrorCode,
    Frame,
    FrameType,
    Setting,
    continuation,
    data,
    encode,
    headers,
    ping,
    priority,
    settings,
    settings_ack,
    window_update,
)
from support.memory_http2 import MemoryPeer
from support.memory_transport import exchange, receive
from support.raw_http2 import call_fields, get_fields, prefixed
from support.twins import TWINS, using

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.body import MAX_RECEIVED_BYTES
from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.http2.receiver import MAX_FRAMES_PER_TURN
from modelserver.wire.limits import HeadLimits, Http2Limits, WireLimits

KIB, MIB = 1 << 10, 1 << 20

# A client's bytes with something of everything.
RECORDING = PREFACE + encode(
    [
        settings({Setting.INITIAL_WINDOW_SIZE: MIB}),
        settings_ack(),
        headers(1, call_fields("Echo"), end=False),
        window_update(1, 5),
        data(1, prefixed(b"one"), end=True),
        headers(3, call_fields("Echo"), end=False, padding=7, depends_on=1),
        data(3, prefixed(b"three")[:2], padding=3),
        data(3, prefixed(b"three")[2:], padding=0),
        data(3, end=True),
        headers(5, b"", end=False, end_headers=False),
        *[continuation(5, piece, end_headers=last) for piece, last in ((b"", False), (b"", False))],
        continuation(5, headers(5, call_fields("Echo")).payload),
        data(5, prefixed(bytes(40_000))[:20_000]),
        ping(),
        data(5, prefixed(bytes(40_000))[20_000:], end=True),
        Frame(0x77, 0xFF, 9, b"unknown"),
        priority(11),
        headers(7, get_fields("/echo", method="POST"), end=False),
        data(7, b"body"),
        headers(7, [("a", "b")]),
        headers(9, get_fields("/")),
        headers(11, call_fields("Sum"), end=False),
        data(11, prefixed(b"a") + prefixed(b"bc") + prefixed(b"")),
        data(11, end=True),
    ]
)


@pytest.fixture(scope="module", autouse=True, params=TWINS)
def twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frames are read and answers joined in C and in Python."""
    with using(request.param):
        yield


async def answer_to(pieces: list[bytes]) -> bytes:
    peer = MemoryPeer(greets=False)
    connection = Http2Connection(peer.context)
    transport = await exchange(connection, pieces)
    return bytes(transport.written)


def frames_of(written: bytes) -> list[tuple[int, int, bytes]]:
    """Frames of each stream in their order; how streams mix depends on what comes in one read."""
    found, at = [], 0
    while at < len(written):
        high, low, kind, flags, stream_id = struct.unpack_from(">HBBBI", written, at)
        start, at = at + 9, at + 9 + (high << 8 | low)
        found.append((stream_id, kind << 8 | flags, written[start:at]))
    return sorted([frame for frame in found if frame[1] >> 8 != FrameType.WINDOW_UPDATE], key=lambda frame: frame[0])


@given(st.lists(st.integers(1, len(RECORDING) - 1), max_size=12))
def test_however_the_bytes_are_cut(cuts: list[int]) -> None:
    points = [0, *sorted(set(cuts)), len(RECORDING)]
    pieces = [RECORDING[start:end] for start, end in pairwise(points)]
    whole = asyncio.run(answer_to([RECORDING]))
    assert frames_of(asyncio.run(answer_to(pieces))) == frames_of(whole)


def test_byte_by_byte() -> None:
    whole = asyncio.run(answer_to([RECORDING]))
    single = [RECORDING[at : at + 1] for at in range(len(RECORDING))]
    assert frames_of(asyncio.run(answer_to(single))) == frames_of(whole)
    assert len([frame for frame in frames_of(whole) if frame[1] >> 8 == FrameType.HEADERS]) >= 10


async def test_large_messages_are_received_into_their_memory() -> None:
    """A frame that has begun is received straight into the message: the buffer is no longer the arena's."""
    peer = MemoryPeer()
    message = bytes(range(256)) * 2048
    body = data(1, prefixed(message), end=True).encode()
    receive(peer.connection, headers(1, call_fields("Echo"), end=False).encode() + body[:1000])
    buffer = peer.connection.get_buffer(-1)
    assert len(buffer) == MAX_RECEIVED_BYTES
    assert buffer.obj is not peer.context.arena.memory
    receive(peer.connection, body[1000:])
    peer.read()
    peer.send(window_update(0, MIB), window_update(1, MIB))
    assert peer.answer(1).messages == [message]


async def test_padding_is_never_received_into_a_message() -> None:
    peer = MemoryPeer()
    message = bytes(100_000)
    body = data(1, prefixed(message), end=True, padding=255).encode()
    receive(peer.connection, headers(1, call_fields("Size"), end=False).encode() + body[:1000])
    assert len(peer.connection.get_buffer(-1)) == len(body) - 1000 - 255
    peer.leave()


async def test_a_turn_has_a_number_of_new_streams() -> None:
    """What exceeds it waits for the next turn of the loop, and the socket is not read meanwhile."""
    peer = MemoryPeer(WireLimits(http2=Http2Limits(max_new_streams_per_turn=10)))
    calls = [
        frame
        for index in range(25)
        for frame in (
            headers(2 * index + 1, call_fields("Echo"), end=False),
            data(2 * index + 1, prefixed(b"%d" % index), end=True),
        )
    ]
    peer.send(*calls)
    assert len([answer for answer in peer.answers.values() if answer.has_ended]) == 9
    assert peer.transport.is_paused
    await peer.settle()
    assert [peer.answer(2 * index + 1).messages for index in range(25)] == [[b"%d" % index] for index in range(25)]
    assert not peer.transport.is_paused


async def test_a_turn_has_a_number_of_frames_out_of_the_ordinary() -> None:
    """Messages in pieces, settings: what exceeds it waits for the next turn of the loop, in its order."""
    peer = MemoryPeer()
    peer.open(1, "Sum")
    peer.send(*[piece for index in range(500) for piece in (data(1, prefixed(b"%d" % index)), settings())])
    assert len(peer.of_type(FrameType.SETTINGS)) == MAX_FRAMES_PER_TURN // 2
    assert peer.transport.is_paused
    await peer.settle(10)
    assert len(peer.of_type(FrameType.SETTINGS)) == 500 - MAX_FRAMES_PER_TURN // 2
    assert not peer.transport.is_paused
    peer.send(data(1, end=True))
    await peer.settle()
    assert peer.answer(1).messages == [b"500 1390"]


async def test_padding_alone_is_an_empty_frame() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(glitches_burst=100, glitches_per_s=0)))
    peer.open(1, "Sum")
    peer.send(data(1, prefixed(b"", length=1000)), *[data(1, padding=255)] * 9)
    assert not peer.goaways
    peer.send(data(1, padding=255))
    assert peer.goaways == [(1, ErrorCode.ENHANCE_YOUR_CALM, b"too_many_glitches")]


async def test_a_fault_in_the_rest_of_a_turn_ends_the_connection() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(max_new_streams_per_turn=1)))
    peer.send(headers(1, call_fields("Hold"), end=False), headers(3, call_fields("Hold"), end=False), data(0, b"x"))
    await peer.settle()
    assert peer.goaways[0][1] == ErrorCode.PROTOCOL_ERROR


async def test_the_connection_is_credited_by_quarters() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(connection_window_bytes=400_000)))
    peer.open(1, "Sum")
    for index in range(6):
        peer.send(data(1, prefixed(bytes(19_995))))
        updates = peer.of_type(FrameType.WINDOW_UPDATE, 0)
        assert [frame.number() for frame in updates] == ([100_000] if index == 4 else [])
        await peer.settle()


async def test_a_message_larger_than_the_window_is_let_in_as_a_whole() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(initial_window_bytes=100_000)))
    peer.open(1, "Echo")
    peer.send(data(1, prefixed(bytes(10), length=300_000)))
    (update,) = peer.of_type(FrameType.WINDOW_UPDATE, 1)
    assert 100_000 + update.number() >= 300_005
    assert 100_000 + update.number() < 300_005 + 16


async def test_data_over_the_window_of_a_stream_is_a_fault() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(initial_window_bytes=70_000)))
    peer.open(1, "Deaf")
    peer.send(data(1, prefixed(bytes(69_000))))
    peer.send(data(1, bytes(1001)))
    assert peer.goaways[0][1] == ErrorCode.FLOW_CONTROL_ERROR
    assert peer.violations == {Violation.FLOW_CONTROL: 1}


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([headers(1, bytes(70_000))], ErrorCode.ENHANCE_YOUR_CALM),
        ([Frame(FrameType.PING, 0, 0, bytes(70_000))], ErrorCode.FRAME_SIZE_ERROR),
        ([Frame(FrameType.SETTINGS, 0, 0, bytes(70_002))], ErrorCode.FRAME_SIZE_ERROR),
        ([Frame(0x77, 0, 0, bytes(MIB + 1))], ErrorCode.FRAME_SIZE_ERROR),
    ],
)
async def test_frames_too_large_to_wait_for(frames: list[Frame], code: ErrorCode) -> None:
    peer = MemoryPeer()
    receive(peer.connection, encode(frames)[:1000])
    peer.read()
    assert peer.goaways[0][1] == code


async def test_large_frames_without_meaning_are_skipped() -> None:
    peer = MemoryPeer()
    peer.send(Frame(0x77, 0, 5, bytes(MIB)), Frame(FrameType.GOAWAY, 0, 0, bytes(200_000)))
    peer.call(1, "Echo", b"x")
    assert peer.answer(1).messages == [b"x"]


async def test_a_block_in_too_many_pieces() -> None:
    peer = MemoryPeer(WireLimits(head=HeadLimits(max_continuations=2)))
    block = headers(1, call_fields("Echo")).payload
    peer.send(headers(1, b"", end_headers=False), continuation(1, end_headers=False), continuation(1, block))
    assert not peer.goaways
    empty = [continuation(3, end_headers=False)] * 3
    peer.send(headers(3, b"", end_headers=False), *empty)
    assert peer.goaways == [(1, ErrorCode.ENHANCE_YOUR_CALM, b"too_many_continuations")]


async def test_after_a_fault_nothing_is_read() -> None:
    peer = MemoryPeer()
    peer.send(data(0, b"x"), headers(1, call_fields("Echo"), end=False), data(1, prefixed(b"x"), end=True))
    assert peer.goaways[0][1] == ErrorCode.PROTOCOL_ERROR
    peer.call(3, "Echo", b"x")
    assert not peer.frames
    assert peer.transport.is_closing()


@pytest.mark.parametrize(("large", "is_borne"), [(16320, True), (256, False)])
async def test_tiny_frames_among_large_ones_are_no_offence(large: int, is_borne: bool) -> None:
    """HAProxy forwards messages in frames of 16320 and 64 bytes, however large they are."""
    peer = MemoryPeer(WireLimits(http2=Http2Limits(glitches_burst=100, glitches_per_s=0)))
    peer.send(headers(1, call_fields("Echo"), end=False), data(1, prefixed(b"", length=64 * MIB)))
    for _ in range(1000):
        peer.send(data(1, bytes(large)), data(1, bytes(64)))
    assert (not peer.violations) is is_borne
    peer.leave()
