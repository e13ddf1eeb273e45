"""RFC 9113, section 4: frames, their size, header compression and its place in the stream of frames."""

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
    settings,
    window_update,
)
from support.http2_script import Step, answers, case, closes, play, says, serves
from support.raw_http2 import Peer, call_fields, get_fields, prefixed

GET = block(get_fields())
ECHO = call_fields("Echo")
LARGEST = 1 << 20


@pytest.mark.parametrize(
    "steps",
    [
        case("4.1-unknown-type", Frame(0x16, payload=b"8 bytes!"), serves()),
        case("4.1-unknown-type-on-a-stream", Frame(0xFF, 0xFF, 1, b"8 bytes!"), serves()),
        case("4.1-undefined-flags", Frame(FrameType.PING, 0x16, 0, b"8 bytes!"), serves()),
        case("4.1-undefined-flags-of-headers", Frame(FrameType.HEADERS, 0xD7, 1, GET), answers(1)),
        case("4.1-reserved-bit", Frame(FrameType.PING, 0, 1 << 31, b"8 bytes!"), serves()),
        case("4.1-reserved-bit-of-a-stream", Frame(FrameType.HEADERS, 5, (1 << 31) | 1, GET), answers(1)),
        case("4.1-reserved-bit-of-an-increment", Frame(FrameType.WINDOW_UPDATE, 0, 0, b"\x80\0\0\1"), serves()),
    ],
)
def test_4_1_frame_format(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_4_1_undefined_flags_are_ignored(peer: Peer) -> None:
    peer.send(Frame(FrameType.PING, 0xFE, 0, b"8 bytes!"))
    peer.until(lambda: peer.pongs == [b"8 bytes!"], "the answer to the PING")


@pytest.mark.parametrize(
    "steps",
    [
        case(
            "4.2-data-of-16384",
            headers(1, ECHO, end=False),
            data(1, prefixed(bytes((1 << 14) - 5)), end=True),
            says(1, 0, [bytes((1 << 14) - 5)]),
        ),
        case(
            "4.2-largest-data",
            headers(1, ECHO, end=False),
            data(1, prefixed(bytes(LARGEST - 5)), end=True),
            lambda peer: peer.until(lambda: len(peer.answer(1).body) == 65535, "as much as the window takes"),
            window_update(0, LARGEST),
            window_update(1, LARGEST),
            says(1, 0, [bytes(LARGEST - 5)]),
        ),
        case(
            "4.2-data-too-large",
            headers(1, ECHO, end=False),
            Frame(FrameType.DATA, 0, 1, bytes(100), length=LARGEST + 1),
            closes(ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "4.2-headers-too-large",
            Frame(FrameType.HEADERS, 5, 1, GET, length=LARGEST + 1),
            closes(ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "4.2-unknown-type-too-large",
            Frame(0x16, 0, 0, b"", length=LARGEST + 1),
            closes(ErrorCode.FRAME_SIZE_ERROR),
        ),
        case(
            "4.2-data-of-16-MiB-announced",
            Frame(FrameType.DATA, 0, 1, b"", length=(1 << 24) - 1),
            closes(ErrorCode.FRAME_SIZE_ERROR),
        ),
        *(
            case(f"4.2-{name}-of-wrong-length", frame, closes(ErrorCode.FRAME_SIZE_ERROR))
            for name, frame in {
                "settings": Frame(FrameType.SETTINGS, 0, 0, bytes(7)),
                "ping": Frame(FrameType.PING, 0, 0, bytes(9)),
                "window-update": Frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(5)),
                "goaway": Frame(FrameType.GOAWAY, 0, 0, bytes(7)),
            }.items()
        ),
    ],
)
def test_4_2_frame_size(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


# Inside a block nothing but its own CONTINUATION may come.
INTRUDERS = {
    "data": data(1, b"x"),
    "headers-of-the-same-stream": headers(1, GET),
    "headers-of-another-stream": headers(3, GET),
    "priority": priority(1),
    "rst-stream": rst_stream(1),
    "settings": settings(),
    "ping": ping(),
    "window-update": window_update(0, 1),
    "unknown-type": Frame(0x16, 0, 0, b"8 bytes!"),
    "continuation-of-another-stream": continuation(3, GET[10:]),
    "continuation-of-stream-0": continuation(0, GET[10:]),
}


@pytest.mark.parametrize("intruder", INTRUDERS.values(), ids=[f"4.3-{name}" for name in INTRUDERS])
def test_4_3_a_block_is_contiguous(peer: Peer, intruder: Frame) -> None:
    peer.send(headers(1, GET[:10], end_headers=False), intruder)
    peer.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "steps",
    [
        # A literal with an index far beyond the tables; a name that claims more bytes than there are.
        case("4.3-bad-index", headers(1, b"\xff\xff\xff\x7f"), closes(ErrorCode.COMPRESSION_ERROR)),
        case("4.3-cut-off", headers(1, b"\x00\x85"), closes(ErrorCode.COMPRESSION_ERROR)),
        case(
            "4.3-bad-trailers",
            headers(1, ECHO, end=False),
            data(1, prefixed(b"")),
            headers(1, b"\x80"),
            closes(ErrorCode.COMPRESSION_ERROR),
        ),
        case("4.3-empty-block", headers(1, b""), lambda peer: peer.expect_error(1, ErrorCode.PROTOCOL_ERROR)),
        case(
            "4.3-block-in-ten-byte-pieces",
            headers(1, GET[:10], end_headers=False),
            continuation(1, GET[10:20], end_headers=False),
            continuation(1, GET[20:]),
            answers(1),
        ),
        case(
            "4.3-block-cut-anywhere",
            *(
                step
                for at in range(len(GET))
                for step in (
                    headers(2 * at + 1, GET[:at], end_headers=False),
                    continuation(2 * at + 1, GET[at:]),
                    answers(2 * at + 1),
                )
            ),
        ),
    ],
)
def test_4_3_compression(peer: Peer, steps: tuple[Step, ...]) -> None:
    play(peer, *steps)


def test_4_3_the_table_lives_on_through_a_refused_request(peer: Peer) -> None:
    """A malformed request's block still changes the dynamic table that later ones refer to."""
    insert = b"\x40\x05x-one\x05first"
    peer.send(headers(1, block(get_fields(method="GET")[:2]) + insert))
    peer.expect_reset(1, ErrorCode.PROTOCOL_ERROR)
    peer.send(headers(3, block(get_fields("/head")) + b"\xbe"))
    assert b'"x-one": "first"' in peer.expect_answer(3).body
