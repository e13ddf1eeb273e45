"""What each side tells the other about itself."""

from __future__ import annotations

import struct

import pytest

from modelserver.wire.http2 import settings
from modelserver.wire.http2.frame import ConnectionFault, ErrorCode
from modelserver.wire.limits import HeadLimits, Http2Limits, WireLimits


def entry(identifier: int, value: int) -> bytes:
    return struct.pack(">HI", identifier, value)


def test_we_announce_our_limits_and_widen_the_connection() -> None:
    ours = Http2Limits(
        max_concurrent_streams=7,
        initial_window_bytes=70_000,
        max_frame_bytes=20_000,
        connection_window_bytes=100_000,
    )
    sent = settings.announcement(WireLimits(http2=ours, head=HeadLimits(max_http2_list_bytes=9000)))
    assert sent[:9] == b"\x00\x00\x18\x04\x00\x00\x00\x00\x00"
    assert dict(struct.iter_unpack(">HI", sent[9:33])) == {3: 7, 4: 70_000, 5: 20_000, 6: 9000}
    assert sent[33:] == b"\x00\x00\x04\x08\x00\x00\x00\x00\x00" + (100_000 - 65_535).to_bytes(4, "big")


def test_a_small_connection_window_cannot_be_announced() -> None:
    assert len(settings.announcement(WireLimits(http2=Http2Limits(connection_window_bytes=65_535)))) == 33


def test_entries_come_in_their_order_and_unknown_ones_too() -> None:
    payload = entry(4, 1) + entry(4, 2) + entry(0xFE03, 1)
    assert settings.read_settings(payload, 32) == [(4, 1), (4, 2), (0xFE03, 1)]


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\0\4\0\0\0", ErrorCode.FRAME_SIZE_ERROR),
        (entry(2, 2), ErrorCode.PROTOCOL_ERROR),
        (entry(4, 1 << 31), ErrorCode.FLOW_CONTROL_ERROR),
        (entry(5, 16_383), ErrorCode.PROTOCOL_ERROR),
        (entry(5, 1 << 24), ErrorCode.PROTOCOL_ERROR),
        (entry(1, 0) * 4, ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_what_may_not_be_is_a_fault(payload: bytes, code: ErrorCode) -> None:
    with pytest.raises(ConnectionFault) as caught:
        settings.read_settings(payload, max_entries=3)
    assert caught.value.code == code


@pytest.mark.parametrize("payload", [entry(2, 1), entry(4, (1 << 31) - 1), entry(5, 16_384), entry(5, (1 << 24) - 1)])
def test_the_limits_themselves_are_right(payload: bytes) -> None:
    assert len(settings.read_settings(payload, 32)) == 1
