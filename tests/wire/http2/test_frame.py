"""Frames as bytes."""

from __future__ import annotations

import pytest
from hyperframe.frame import Frame as OracleFrame
from hyperframe.frame import GoAwayFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2 import frame as frames
from modelserver.wire.http2.frame import ConnectionFault, ErrorCode


def parse(data: bytes) -> OracleFrame:
    found, length = OracleFrame.parse_frame_header(memoryview(data[:9]))
    assert length == len(data) - 9
    found.parse_body(memoryview(data[9:]))
    return found


def test_frames_are_what_another_library_reads() -> None:
    update = parse(frames.window_update(5, 70_000))
    assert isinstance(update, WindowUpdateFrame)
    assert (update.stream_id, update.window_increment) == (5, 70_000)
    reset = parse(frames.rst_stream(7, ErrorCode.CANCEL))
    assert isinstance(reset, RstStreamFrame)
    assert (reset.stream_id, reset.error_code) == (7, 8)
    goaway = parse(frames.goaway(9, ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings"))
    assert isinstance(goaway, GoAwayFrame)
    assert (goaway.last_stream_id, goaway.error_code, goaway.additional_data) == (9, 11, b"too_many_pings")
    ping = parse(frames.ping(b"12345678"))
    assert isinstance(ping, PingFrame)
    assert (ping.opaque_data, set(ping.flags)) == (b"12345678", set())
    assert set(parse(frames.ping_ack(b"12345678")).flags) == {"ACK"}
    acknowledgement = parse(frames.SETTINGS_ACK)
    assert isinstance(acknowledgement, SettingsFrame)
    assert set(acknowledgement.flags) == {"ACK"}


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, (1 << 24) - 1])
def test_a_length_has_24_bits(size: int) -> None:
    made = frames.frame(frames.DATA, frames.END_STREAM, 1, bytes(size))
    assert int.from_bytes(made[:3], "big") == size == len(made) - frames.HEAD_BYTES


@pytest.mark.parametrize(
    ("code", "violation"),
    [
        (ErrorCode.PROTOCOL_ERROR, Violation.PROTOCOL),
        (ErrorCode.STREAM_CLOSED, Violation.PROTOCOL),
        (ErrorCode.FRAME_SIZE_ERROR, Violation.FRAME_SIZE),
        (ErrorCode.FLOW_CONTROL_ERROR, Violation.FLOW_CONTROL),
        (ErrorCode.COMPRESSION_ERROR, Violation.COMPRESSION),
    ],
)
def test_a_fault_counts_as_what_its_code_says(code: ErrorCode, violation: Violation) -> None:
    assert ConnectionFault(code, "why").violation is violation


def test_the_text_of_too_much_is_the_bare_name() -> None:
    fault = frames.too_much(Violation.TOO_MANY_PINGS)
    assert (fault.code, fault.text) == (ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
