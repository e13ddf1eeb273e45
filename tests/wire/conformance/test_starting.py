"""RFC 9113, section 3: starting HTTP/2."""

from __future__ import annotations

import pytest
from support.http2_frames import PREFACE, ErrorCode, FrameType, Setting, data, headers, ping, settings, window_update
from support.http2_script import Step, case, closes, play, serves
from support.raw_http2 import Peer, get_fields
from support.wires import RunningWire


def test_3_4_the_server_begins_with_settings(wire: RunningWire) -> None:
    with Peer(wire.address, shakes_hands=False) as peer:
        peer.send_bytes(PREFACE + settings().encode())
        first = peer.read_frame()
        assert first is not None
        assert first.type == FrameType.SETTINGS
        assert not first.is_ack


def test_3_4_the_server_announces_its_limits(peer: Peer) -> None:
    assert peer.settings == {
        Setting.MAX_CONCURRENT_STREAMS: 1000,
        Setting.INITIAL_WINDOW_SIZE: 1 << 20,
        Setting.MAX_FRAME_SIZE: 1 << 20,
        Setting.MAX_HEADER_LIST_SIZE: 1 << 14,
    }
    assert peer.window_updates == [(0, (1 << 26) - 65535)]


def test_3_4_a_request_may_follow_the_preface_at_once(wire: RunningWire) -> None:
    with Peer(wire.address, shakes_hands=False) as peer:
        peer.send_bytes(PREFACE + settings().encode() + headers(1, get_fields()).encode())
        assert peer.expect_answer(1).body


@pytest.mark.parametrize("cut", [1, 3, 4, 23, 24, 28, 33], ids=lambda cut: f"3.4-after-{cut}-bytes")
def test_3_4_a_preface_in_pieces(wire: RunningWire, cut: int) -> None:
    sent = PREFACE + settings().encode() + headers(1, get_fields()).encode()
    with Peer(wire.address, shakes_hands=False) as peer:
        peer.send_bytes(sent[:cut])
        peer.send_bytes(sent[cut:])
        assert peer.expect_answer(1).body


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(PREFACE[:-1] + b"x", id="3.4-last-byte-wrong"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\n\n", id="3.4-line-ends-wrong"),
        pytest.param(b"PRI * HTTP/1.1\r\n\r\nSM\r\n\r\n", id="3.4-other-version"),
    ],
)
def test_3_4_a_wrong_preface(wire: RunningWire, sent: bytes) -> None:
    with Peer(wire.address, shakes_hands=False) as peer:
        peer.send_bytes(sent)
        peer.expect_closed()
        assert [told.code for told in peer.goaways] in ([], [ErrorCode.PROTOCOL_ERROR])


@pytest.mark.parametrize(
    "steps",
    [
        case("3.4-first-frame-ping", ping(), closes(ErrorCode.PROTOCOL_ERROR)),
        case("3.4-first-frame-headers", headers(1, get_fields()), closes(ErrorCode.PROTOCOL_ERROR)),
        case("3.4-first-frame-data", data(1, b"x"), closes(ErrorCode.PROTOCOL_ERROR)),
        case("3.4-first-frame-window-update", window_update(0, 1), closes(ErrorCode.PROTOCOL_ERROR)),
        case("3.4-second-preface", settings(), PREFACE, closes(ErrorCode.FRAME_SIZE_ERROR)),
        case("3.4-settings-first", settings(), serves()),
    ],
)
def test_3_4_the_first_frame_is_settings(wire: RunningWire, steps: tuple[Step, ...]) -> None:
    with Peer(wire.address, shakes_hands=False) as peer:
        play(peer, PREFACE, *steps)
