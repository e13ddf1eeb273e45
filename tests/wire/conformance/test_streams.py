"""RFC 9113, section 5: stream states, identifiers, concurrency, priority, errors, extensions."""

from __future__ import annotations

import pytest
from support.http2_frames import (
    ErrorCode,
    Frame,
    FrameType,
    block,
    continuation,
    data,
    headers,
    ping,
    priority,
    rst_stream,
    window_update,
)
from support.http2_script import Step, answers, case, closes, errs, keeps_silent, play, resets, says, serves
from support.raw_http2 import Peer, call_fields, get_fields, prefixed
from support.wires import RunningWire

GET = block(get_fields())
ECHO = block(call_fields("Echo"))
HOLD = block(call_fields("Hold"))
# A call that the test never lets go, closed on our side: its stream stays half-closed (remote).
HELD = headers(1, HOLD, end=False).encode() + data(1, prefixed(b"x"), end=True).encode()
OPEN = headers(1, ECHO, end=False)


@pytest.mark.parametrize(
    "steps",
    [
        case("5.1-idle-data", data(1, b"x", end=True), closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED)),
        case("5.1-idle-rst-stream", rst_stream(1), closes(ErrorCode.PROTOCOL_ERROR)),
        case("5.1-idle-window-update", window_update(1, 100), closes(ErrorCode.PROTOCOL_ERROR)),
        case("5.1-idle-continuation", continuation(1, GET), closes(ErrorCode.PROTOCOL_ERROR)),
        case("5.1-idle-priority", priority(5, 3), headers(7, GET), answers(7)),
        case("5.1-idle-data-beyond-the-last", headers(1, GET), data(3), closes(ErrorCode.PROTOCOL_ERROR)),
        # A stream that was passed over is closed: it was never opened, so any code that says so will do.
        case(
            "5.1-skipped-data",
            headers(5, GET),
            answers(5),
            data(3, b"x"),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED),
        ),
        case("5.1-skipped-window-update", headers(5, GET), window_update(3, 1), serves()),
        case("5.1-skipped-rst-stream", headers(5, GET), rst_stream(3), serves()),
    ],
)
def test_5_1_idle(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


@pytest.mark.parametrize(
    "steps",
    [
        case("5.1-half-closed-data", HELD, data(1, b"x", end=True), errs(1, ErrorCode.STREAM_CLOSED)),
        case("5.1-half-closed-empty-data", HELD, data(1), errs(1, ErrorCode.STREAM_CLOSED)),
        case("5.1-half-closed-headers", HELD, headers(1, GET), errs(1, ErrorCode.STREAM_CLOSED)),
        case(
            "5.1-half-closed-continuation",
            HELD,
            continuation(1, GET),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED),
        ),
        case("5.1-half-closed-window-update", HELD, window_update(1, 100), keeps_silent(1)),
        case("5.1-half-closed-priority", HELD, priority(1, 0), keeps_silent(1)),
        case("5.1-half-closed-rst-stream", HELD, rst_stream(1), keeps_silent(1)),
    ],
)
def test_5_1_half_closed(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


@pytest.mark.parametrize(
    "steps",
    [
        case("5.1-reset-data", OPEN, rst_stream(1), data(1, b"x", end=True), errs(1, ErrorCode.STREAM_CLOSED)),
        case("5.1-reset-headers", OPEN, rst_stream(1), headers(1, GET), errs(1, ErrorCode.STREAM_CLOSED)),
        case(
            "5.1-reset-continuation",
            OPEN,
            rst_stream(1),
            continuation(1, GET),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED),
        ),
        case("5.1-reset-again", OPEN, rst_stream(1), rst_stream(1), serves()),
        case("5.1-reset-window-update", OPEN, rst_stream(1), window_update(1, 100), serves()),
        case("5.1-reset-priority", OPEN, rst_stream(1), priority(1), serves()),
        case(
            "5.1-closed-data",
            headers(1, GET),
            answers(1),
            data(1, b"x", end=True),
            errs(1, ErrorCode.STREAM_CLOSED),
        ),
        case("5.1-closed-headers", headers(1, GET), answers(1), headers(1, GET), closes(ErrorCode.STREAM_CLOSED)),
        case(
            "5.1-closed-continuation",
            headers(1, GET),
            answers(1),
            continuation(1, GET),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED),
        ),
        case("5.1-closed-window-update", headers(1, GET), answers(1), window_update(1, 100), serves()),
        case("5.1-closed-rst-stream", headers(1, GET), answers(1), rst_stream(1), serves()),
        case("5.1-closed-priority", headers(1, GET), answers(1), priority(1, 0), serves()),
        # What was on its way when the server reset the stream is no offence, and does not cost us the connection.
        case(
            "5.1-reset-by-the-server-data",
            headers(1, get_fields(""), end=False),
            resets(1, ErrorCode.PROTOCOL_ERROR),
            data(1, b"in flight"),
            data(1, b"the last", end=True),
            headers(3, GET),
            answers(3),
        ),
        case(
            "5.1-reset-by-the-server-trailers",
            headers(1, get_fields(""), end=False),
            resets(1, ErrorCode.PROTOCOL_ERROR),
            headers(1, [("x-trailer", "1")]),
            window_update(1, 10),
            rst_stream(1),
            headers(3, GET),
            answers(3),
        ),
    ],
)
def test_5_1_closed(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


@pytest.mark.parametrize(
    "steps",
    [
        case("5.1.1-even", headers(2, GET), closes(ErrorCode.PROTOCOL_ERROR)),
        case("5.1.1-zero", headers(0, GET), closes(ErrorCode.PROTOCOL_ERROR)),
        case(
            "5.1.1-smaller-than-an-open-one",
            headers(5, ECHO, end=False),
            headers(3, GET),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED),
        ),
        case(
            "5.1.1-smaller-than-a-closed-one",
            headers(5, GET),
            answers(5),
            headers(3, GET),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED),
        ),
        case("5.1.1-skipping", headers(3, GET), headers(1001, GET), answers(3), answers(1001), serves()),
        case("5.1.1-the-largest", headers((1 << 31) - 1, GET), answers((1 << 31) - 1)),
    ],
)
def test_5_1_1_identifiers(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_5_1_2_more_streams_than_announced_are_refused(peer: Peer) -> None:
    """REFUSED_STREAM promises that nothing ran, so that clients may try again."""
    most = peer.settings[3]
    peer.send(*(headers(2 * index + 1, HOLD, end=False) for index in range(most + 3)))
    for refused in range(2 * most + 1, 2 * most + 6, 2):
        peer.expect_reset(refused, ErrorCode.REFUSED_STREAM)
    assert len(peer.resets) == 3
    # As soon as one is free, the next is taken.
    peer.send(rst_stream(1), headers(2 * most + 7, GET))
    assert peer.expect_answer(2 * most + 7).body


@pytest.mark.parametrize(
    "steps",
    [
        case("5.3.1-headers-depend-on-themselves", headers(1, GET, depends_on=1), errs(1, ErrorCode.PROTOCOL_ERROR)),
        case("5.3.1-priority-depends-on-itself", priority(3, 3), errs(3, ErrorCode.PROTOCOL_ERROR)),
        case("5.3.1-exclusively", headers(1, GET, depends_on=(1 << 31) | 1), errs(1, ErrorCode.PROTOCOL_ERROR)),
        case("5.3.2-headers-with-priority", headers(1, GET, depends_on=0), answers(1)),
        case("5.3.2-headers-with-priority-and-padding", headers(1, GET, depends_on=0, padding=8), answers(1)),
        case("5.3.2-exclusive", headers(1, GET, depends_on=1 << 31), answers(1)),
        case("5.3.2-depends-on-an-idle-stream", headers(1, GET, depends_on=1001), answers(1)),
        case("5.3.2-lightest", priority(1, weight=1), headers(1, GET), answers(1)),
        case("5.3.2-heaviest", priority(1, weight=256), headers(1, GET), answers(1)),
        case("5.3.2-exclusive-priority", priority(3, (1 << 31) | 1), headers(3, GET), answers(3)),
        case("5.3.2-of-a-higher-stream", priority(5, 1), headers(1, GET), answers(1)),
        # nghttp begins so: a tree of idle streams, then its request on another.
        case("5.3.2-tree", *(priority(number, 0) for number in (3, 5, 7, 9, 11)), headers(13, GET), answers(13)),
    ],
)
def test_5_3_priority(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


@pytest.mark.parametrize("last", [1, 5])
def test_5_4_1_goaway_names_the_last_stream(peer: Peer, last: int) -> None:
    peer.get(last)
    peer.expect_answer(last)
    peer.send(Frame(FrameType.PING, 0, 0, b"short"))
    assert peer.expect_goaway(ErrorCode.FRAME_SIZE_ERROR).last_stream_id == last


def test_5_4_1_a_connection_error_is_counted(wire: RunningWire, peer: Peer) -> None:
    before = wire.violations("protocol_error")
    peer.send(data(0, b"x"))
    peer.expect_goaway(ErrorCode.PROTOCOL_ERROR)
    wire.until(lambda: wire.violations("protocol_error") == before + 1, "the violation was counted")


def test_5_4_2_a_stream_error_leaves_other_streams_alone(peer: Peer) -> None:
    peer.send(headers(1, ECHO, end=False), data(1, prefixed(b"12345678")[:9]))
    peer.send(headers(3, [(":method", "GET")]))
    peer.expect_reset(3, ErrorCode.PROTOCOL_ERROR)
    peer.send(data(1, b"5678", end=True))
    assert peer.expect_answer(1).messages == [b"12345678"]


@pytest.mark.parametrize("code", [0xFF, 0xFFFFFFFF, 0x10], ids=["7-255", "7-largest", "7-unassigned"])
def test_7_unknown_error_codes_mean_nothing_special(peer: Peer, code: int) -> None:
    peer.send(OPEN, rst_stream(1, code), headers(3, GET))
    peer.expect_answer(3)
    peer.expect_alive()


@pytest.mark.parametrize(
    "steps",
    [
        case("5.5-unknown-frame", Frame(0x16, 0, 0, b"8 bytes!"), headers(1, GET), answers(1)),
        case("5.5-unknown-frame-of-a-stream", OPEN, Frame(0x16, 0, 1), data(1, prefixed(b"a"), end=True), says(1, 0)),
        case(
            "5.5-unknown-frame-inside-a-block",
            headers(1, GET[:5], end_headers=False),
            Frame(0x16, 0, 0, b"8 bytes!"),
            closes(ErrorCode.PROTOCOL_ERROR),
        ),
        case("5.5-unknown-setting", Frame(FrameType.SETTINGS, 0, 0, b"\xfe\x03\0\0\0\1"), serves()),
    ],
)
def test_5_5_extensions(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_5_answers_overtake_each_other(wire: RunningWire, peer: Peer) -> None:
    """A call that takes long holds up none that came after it."""
    peer.send_bytes(HELD)
    peer.call(3, "Echo", b"quick")
    assert peer.expect_answer(3).messages == [b"quick"]
    wire.release()
    assert peer.expect_answer(1).messages == [b"x"]


def test_5_ping_is_answered_while_a_call_runs(peer: Peer) -> None:
    peer.send_bytes(HELD)
    peer.send(ping(b"are you?"))
    peer.until(lambda: peer.pongs == [b"are you?"], "the answer to the PING")
