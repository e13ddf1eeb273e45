"""RFC 9113, section 6: what each frame may hold and where it may come. Windows: test_flow_control.py."""

from __future__ import annotations

import pytest
from support.http2_frames import (
    MAX_WINDOW_BYTES,
    ErrorCode,
    Frame,
    FrameType,
    Setting,
    block,
    continuation,
    data,
    goaway,
    headers,
    ping,
    priority,
    push_promise,
    rst_stream,
    settings,
    settings_ack,
)
from support.http2_script import Step, answers, case, closes, errs, keeps_silent, play, says, serves
from support.raw_http2 import Peer, call_fields, get_fields, prefixed

GET = block(get_fields())
POST = block(get_fields("/echo", method="POST"))
ECHO = block(call_fields("Echo"))
MESSAGE = prefixed(b"a message")


@pytest.mark.parametrize(
    "steps",
    [
        case("6.1-whole", headers(1, ECHO, end=False), data(1, MESSAGE, end=True), says(1, 0, [b"a message"])),
        case(
            "6.1-in-pieces",
            headers(1, ECHO, end=False),
            *(data(1, MESSAGE[at : at + 1]) for at in range(len(MESSAGE))),
            data(1, end=True),
            says(1, 0, [b"a message"]),
        ),
        case(
            "6.1-padded",
            headers(1, ECHO, end=False),
            data(1, MESSAGE[:6], padding=255),
            data(1, MESSAGE[6:], end=True, padding=0),
            says(1, 0, [b"a message"]),
        ),
        case(
            "6.1-nothing-but-padding",
            headers(1, ECHO, end=False),
            data(1, padding=7),
            data(1, MESSAGE),
            data(1, padding=255, end=True),
            says(1, 0, [b"a message"]),
        ),
        case("6.1-padded-body", headers(1, POST, end=False), data(1, b"abc", padding=9, end=True), answers(1)),
        case("6.1-stream-0", data(0, b"x"), closes(ErrorCode.PROTOCOL_ERROR)),
        case(
            "6.1-pad-length-of-the-payload",
            headers(1, ECHO, end=False),
            Frame(FrameType.DATA, 0x09, 1, b"\x04abc"),
            closes(ErrorCode.PROTOCOL_ERROR),
        ),
        case(
            "6.1-padded-without-pad-length",
            headers(1, ECHO, end=False),
            Frame(FrameType.DATA, 0x09, 1, b""),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "6.1-on-a-closed-stream",
            headers(1, ECHO, end=False),
            data(1, MESSAGE, end=True),
            says(1, 0),
            data(1, b"x"),
            errs(1, ErrorCode.STREAM_CLOSED),
        ),
    ],
)
def test_6_1_data(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


@pytest.mark.parametrize(
    "steps",
    [
        case("6.2-whole", headers(1, GET), answers(1)),
        case("6.2-padded", headers(1, GET, padding=10), answers(1)),
        case("6.2-padded-by-nothing", headers(1, GET, padding=0), answers(1)),
        case(
            "6.2-padded-and-continued",
            headers(1, GET[:7], end_headers=False, padding=99),
            continuation(1, GET[7:]),
            answers(1),
        ),
        case("6.2-stream-0", headers(0, GET), closes(ErrorCode.PROTOCOL_ERROR)),
        case(
            "6.2-pad-length-beyond-the-payload",
            Frame(FrameType.HEADERS, 0x0D, 1, bytes((len(GET) + 1,)) + GET),
            closes(ErrorCode.PROTOCOL_ERROR),
        ),
        case(
            "6.2-padded-without-pad-length",
            Frame(FrameType.HEADERS, 0x0D, 1, b""),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "6.2-priority-cut-off",
            Frame(FrameType.HEADERS, 0x25, 1, b"\0\0\0"),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "6.2-pad-length-beyond-the-priority",
            Frame(FrameType.HEADERS, 0x2D, 1, b"\x04\0\0\0\0\x10abc"),
            closes(ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "6.2-end-of-stream-before-the-end-of-the-block",
            headers(1, GET[:9], end=True, end_headers=False),
            continuation(1, GET[9:]),
            answers(1),
        ),
    ],
)
def test_6_2_headers(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


@pytest.mark.parametrize(
    "steps",
    [
        case("6.3-stream-0", priority(0), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.3-short", Frame(FrameType.PRIORITY, 0, 1, b"\x80\0\0\1"), errs(1, ErrorCode.FRAME_SIZE_ERROR)),
        case("6.3-long", Frame(FrameType.PRIORITY, 0, 1, bytes(6)), errs(1, ErrorCode.FRAME_SIZE_ERROR)),
        case("6.4-stream-0", rst_stream(0), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.4-idle", rst_stream(1), closes(ErrorCode.PROTOCOL_ERROR)),
        case(
            "6.4-short",
            headers(1, ECHO, end=False),
            Frame(FrameType.RST_STREAM, 0, 1, bytes(3)),
            closes(ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "6.4-long",
            headers(1, ECHO, end=False),
            Frame(FrameType.RST_STREAM, 0, 1, bytes(5)),
            closes(ErrorCode.FRAME_SIZE_ERROR),
        ),
        case("6.4-open", headers(1, ECHO, end=False), rst_stream(1), keeps_silent(1)),
    ],
)
def test_6_3_priority_and_6_4_rst_stream(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def one(setting: int, value: int) -> Frame:
    return settings({setting: value})


@pytest.mark.parametrize(
    "steps",
    [
        case("6.5-empty", settings(), serves()),
        case("6.5-all-known", settings({1: 0, 2: 0, 3: 0, 4: 65535, 5: 16384, 6: 0}), serves()),
        case("6.5-ack-with-payload", Frame(FrameType.SETTINGS, 1, 0, bytes(6)), closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("6.5-on-a-stream", Frame(FrameType.SETTINGS, 0, 1, b""), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.5-ack-on-a-stream", Frame(FrameType.SETTINGS, 1, 1, b""), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.5-short", Frame(FrameType.SETTINGS, 0, 0, bytes(3)), closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("6.5-unearned-ack", settings_ack(), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.5.2-no-push", one(Setting.ENABLE_PUSH, 0), serves()),
        case("6.5.2-push-2", one(Setting.ENABLE_PUSH, 2), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.5.2-window-largest", one(Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW_BYTES), serves()),
        case("6.5.2-window-too-large", one(Setting.INITIAL_WINDOW_SIZE, 1 << 31), closes(ErrorCode.FLOW_CONTROL_ERROR)),
        case("6.5.2-frame-too-small", one(Setting.MAX_FRAME_SIZE, (1 << 14) - 1), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.5.2-frame-too-large", one(Setting.MAX_FRAME_SIZE, 1 << 24), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.5.2-frame-largest", one(Setting.MAX_FRAME_SIZE, (1 << 24) - 1), serves()),
        case("6.5.2-unknown", settings({0xFF: 1, 0: 5, 0xFFFF: 0xFFFFFFFF}), serves()),
        case("6.5.2-32-entries", settings([(0xFF, 1)] * 32), serves()),
        case(
            "6.5.3-each-is-acknowledged",
            *[settings()] * 9,
            lambda peer: peer.until(lambda: peer.num_settings_acks == 10, "an ACK for each SETTINGS"),
        ),
        case(
            "6.5.3-the-last-value-counts",
            settings([(4, 1 << 31 - 1), (4, 3)]),
            headers(1, GET),
            lambda peer: peer.until(lambda: peer.answer(1).data_lengths == [3], "a DATA frame of three bytes"),
        ),
    ],
)
def test_6_5_settings(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_6_5_2_no_frame_is_larger_than_the_peer_allows(peer: Peer) -> None:
    peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
    peer.call(1, "Size", b"40000")
    assert max(peer.expect_answer(1).data_lengths) == 1 << 14
    peer.send(settings({Setting.MAX_FRAME_SIZE: 20000}))
    peer.call(3, "Size", b"20000")
    assert max(peer.expect_answer(3).data_lengths) <= 20000
    assert peer.expect_answer(3).messages == [bytes(20000)]


@pytest.mark.parametrize(
    "steps",
    [
        case("6.7-ack", ping(ack=True), serves()),
        case("6.7-on-a-stream", Frame(FrameType.PING, 0, 1, bytes(8)), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.7-short", Frame(FrameType.PING, 0, 0, bytes(6)), closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("6.7-empty", Frame(FrameType.PING, 0, 0, b""), closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("6.7-short-ack", Frame(FrameType.PING, 1, 0, bytes(7)), closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("6.8-on-a-stream", Frame(FrameType.GOAWAY, 0, 1, bytes(8)), closes(ErrorCode.PROTOCOL_ERROR)),
        case("6.8-short", Frame(FrameType.GOAWAY, 0, 0, bytes(7)), closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("6.6-push-promise", push_promise(1, 2, get_fields()), closes(ErrorCode.PROTOCOL_ERROR)),
        case(
            "6.6-push-promise-on-an-open-stream",
            headers(1, ECHO, end=False),
            push_promise(1, 2, get_fields()),
            closes(ErrorCode.PROTOCOL_ERROR),
        ),
    ],
)
def test_6_6_to_6_8(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_6_7_a_ping_comes_back_as_it_was(peer: Peer) -> None:
    peer.send(ping(b"h2spec??"), ping(b"\0\1\2\3\4\5\6\xff"))
    peer.until(lambda: len(peer.pongs) == 2, "both answers")
    assert peer.pongs == [b"h2spec??", b"\0\1\2\3\4\5\6\xff"]


@pytest.mark.parametrize("code", [ErrorCode.NO_ERROR, 0xFF, ErrorCode.INTERNAL_ERROR])
def test_6_8_after_the_clients_goaway_open_streams_are_answered(peer: Peer, code: int) -> None:
    """It says only that the server may open no streams; what it asked for it still wants."""
    peer.send(headers(1, ECHO, end=False), goaway(0, code, b"debug data"), data(1, MESSAGE, end=True))
    assert peer.expect_answer(1).messages == [b"a message"]


@pytest.mark.parametrize(
    "steps",
    [
        case("6.10-one", headers(1, GET[:11], end_headers=False), continuation(1, GET[11:]), answers(1)),
        case(
            "6.10-some-of-them-empty",
            headers(1, b"", end_headers=False),
            continuation(1, b"", end_headers=False),
            continuation(1, GET, end_headers=False),
            continuation(1),
            answers(1),
        ),
        case(
            "6.10-trailers",
            headers(1, ECHO, end=False),
            data(1, MESSAGE),
            headers(1, b"", end_headers=False),
            continuation(1, block([("x-end", "1")])),
            says(1, 0, [b"a message"]),
        ),
        case(
            "6.10-stream-0",
            headers(1, GET[:11], end_headers=False),
            continuation(0, GET[11:]),
            closes(ErrorCode.PROTOCOL_ERROR),
        ),
        case("6.10-after-the-end-of-a-block", headers(1, GET), continuation(1, b""), closes(ErrorCode.PROTOCOL_ERROR)),
        case(
            "6.10-after-the-last-continuation",
            headers(1, GET[:11], end_headers=False),
            continuation(1, GET[11:]),
            continuation(1, b""),
            closes(ErrorCode.PROTOCOL_ERROR),
        ),
        case(
            "6.10-after-data",
            headers(1, ECHO, end=False),
            data(1, b"\0"),
            continuation(1, GET),
            closes(ErrorCode.PROTOCOL_ERROR),
        ),
    ],
)
def test_6_10_continuation(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)
