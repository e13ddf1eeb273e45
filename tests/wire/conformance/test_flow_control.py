"""RFC 9113, sections 5.2 and 6.9: windows of both directions."""

from __future__ import annotations

import pytest
from support.http2_frames import (
    DEFAULT_WINDOW_BYTES,
    MAX_WINDOW_BYTES,
    ErrorCode,
    Frame,
    FrameType,
    Setting,
    block,
    data,
    headers,
    rst_stream,
    settings,
    window_update,
)
from support.http2_script import Step, answers, case, closes, errs, has_sent, play, resets, says, serves
from support.raw_http2 import Peer, call_fields, get_fields, prefixed
from support.wires import RunningWire

GET = block(get_fields())
ECHO = block(call_fields("Echo"))
STREAM_WINDOW = 1 << 20
OPEN = headers(1, ECHO, end=False)


def window(size: int) -> Frame:
    return settings({Setting.INITIAL_WINDOW_SIZE: size})


@pytest.mark.parametrize(
    "steps",
    [
        case("6.9-zero-increment", window_update(0, 0), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.9-zero-increment-of-a-stream", OPEN, window_update(1, 0), errs(1, ErrorCode.PROTOCOL_ERROR)),
        case("6.9-short", Frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(3)), closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("6.9-connection", window_update(0, 1), headers(1, GET), answers(1)),
        case("6.9-stream", OPEN, window_update(1, 1), data(1, prefixed(b"a"), end=True), says(1, 0, [b"a"])),
        case(
            "6.9.1-connection-overflow",
            window_update(0, MAX_WINDOW_BYTES),
            window_update(0, 1),
            closes(ErrorCode.FLOW_CONTROL_ERROR),
        ),
        case("6.9.1-largest", window_update(0, MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES), serves()),
        case(
            "6.9.1-one-too-many",
            window_update(0, MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES + 1),
            closes(ErrorCode.FLOW_CONTROL_ERROR),
        ),
        case(
            "6.9.1-stream-overflow", OPEN, window_update(1, MAX_WINDOW_BYTES), resets(1, ErrorCode.FLOW_CONTROL_ERROR)
        ),
        case("6.9.1-window-1", window(1), headers(1, GET), has_sent(1, 1), window_update(1, 2), has_sent(1, 3)),
        case("6.9.1-window-0", window(0), headers(1, GET), has_sent(1, 0), window_update(1, 99), answers(1)),
        case(
            "6.9.2-larger-later",
            window(0),
            headers(1, GET),
            has_sent(1, 0),
            window(1),
            has_sent(1, 1),
            window(99),
            answers(1),
        ),
        # A window of 3, all used; made 2 it is -1; 2 more make it 1.
        case(
            "6.9.2-negative", window(3), headers(1, GET), has_sent(1, 3), window(2), window_update(1, 2), has_sent(1, 4)
        ),
        case("6.9.2-too-large", window(1 << 31), closes(ErrorCode.FLOW_CONTROL_ERROR)),
        case(
            "6.9.2-overflow-of-an-open-stream",
            OPEN,
            window_update(1, 1),
            window(MAX_WINDOW_BYTES),
            closes(ErrorCode.FLOW_CONTROL_ERROR),
        ),
    ],
)
def test_6_9_windows_for_what_the_server_sends(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_6_9_1_the_connections_window_bounds_all_streams_together(peer: Peer) -> None:
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW_BYTES}))
    for stream_id in (1, 3):
        peer.call(stream_id, "Size", b"50000")

    def received() -> int:
        return len(peer.answer(1).body) + len(peer.answer(3).body)

    peer.until(lambda: received() == DEFAULT_WINDOW_BYTES, "as much as the connection's window allows")
    peer.expect_alive()
    assert received() == DEFAULT_WINDOW_BYTES
    peer.send(window_update(0, 50000))
    assert [len(peer.expect_answer(stream_id).body) for stream_id in (1, 3)] == [50005, 50005]


def test_6_9_a_stalled_stream_holds_up_no_other(peer: Peer) -> None:
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    peer.call(1, "Size", b"1000")
    peer.call(3, "Size", b"1000")
    peer.send(window_update(3, 2000))
    assert peer.expect_answer(3).messages == [bytes(1000)]
    assert not peer.answer(1).body


def test_6_9_an_empty_answer_needs_no_window(peer: Peer) -> None:
    """Headers and trailers are not flow-controlled; only the five bytes of the prefix are."""
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    peer.call(1, "Fail", b"5 gone")
    assert peer.expect_answer(1).grpc_status == 5


def test_6_9_a_reset_gives_up_what_was_not_sent(wire: RunningWire, peer: Peer) -> None:
    peer.call(1, "Size", b"100000")
    peer.until(lambda: len(peer.answer(1).body) == DEFAULT_WINDOW_BYTES, "a full window")
    peer.send(rst_stream(1), window_update(0, 1 << 20))
    peer.expect_alive()
    assert len(peer.answer(1).body) == DEFAULT_WINDOW_BYTES
    wire.until(lambda: wire.counts.open_streams == 0, "the stream was closed")


@pytest.mark.parametrize("padding", [None, 255], ids=["6.9.1-beyond-the-window", "6.9.1-padding-counts"])
def test_6_9_1_a_client_that_sends_more_than_the_stream_window(peer: Peer, padding: int | None) -> None:
    """A body that nobody consumes before its end gets a window that is smaller than what comes."""
    peer.send(headers(1, block(call_fields("Chat")), end=False))
    piece = data(1, prefixed(bytes((1 << 14) - 300)), padding=padding)
    peer.send_bytes(piece.encode() * 400)
    peer.expect_error(1, ErrorCode.FLOW_CONTROL_ERROR)


def test_6_9_1_the_connections_window_is_given_back(peer: Peer) -> None:
    """Far more than the connection's window goes through one connection, with updates in time."""
    room = DEFAULT_WINDOW_BYTES + sum(increment for stream_id, increment in peer.window_updates if stream_id == 0)
    num_sent, stream_id, message = 0, 1, bytes(STREAM_WINDOW - 5)
    peer.send(window_update(0, MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES))
    while num_sent < room * 5 // 4:
        peer.send(
            headers(stream_id, block(call_fields("Ignore")), end=False), data(stream_id, prefixed(message), end=True)
        )
        peer.expect_answer(stream_id)
        num_sent += len(message) + 5
        stream_id += 2
    given_back = sum(increment for stream_id, increment in peer.window_updates if stream_id == 0)
    assert given_back + DEFAULT_WINDOW_BYTES >= num_sent


def test_6_9_a_message_larger_than_the_window_gets_the_room_it_needs(peer: Peer) -> None:
    """As soon as the length is known, the window grows to take the whole message (grpc-go does so too)."""
    message = bytes(range(256)) * (5 << 12)
    sent = prefixed(message)
    peer.send(headers(1, block(call_fields("Ignore")), end=False))
    peer.send(*(data(1, sent[at : at + 65536]) for at in range(0, STREAM_WINDOW, 65536)))
    peer.until(
        lambda: (
            sum(increment for stream_id, increment in peer.window_updates if stream_id == 1)
            >= len(sent) - STREAM_WINDOW
        ),
        "room for the rest of the message",
    )
    peer.send(*(data(1, sent[at : at + 65536]) for at in range(STREAM_WINDOW, len(sent), 65536)), data(1, end=True))
    assert peer.expect_answer(1).messages == [str(len(message)).encode()]
