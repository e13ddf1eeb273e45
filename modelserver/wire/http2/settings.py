"""The settings that each side sends about itself (RFC 9113, 6.5)."""

from __future__ import annotations

import struct
from typing import Final

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.frame import (
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW_BYTES,
    MAX_31_BITS,
    MAX_FRAME_BYTES,
    SETTINGS,
    ConnectionFault,
    ErrorCode,
    frame,
    protocol_fault,
    too_much,
    window_update,
)
from modelserver.wire.limits import WireLimits

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

DEFAULT_HEADER_TABLE_BYTES: Final = 4096

_ENTRY: Final = struct.Struct(">HI")


def announcement(limits: WireLimits) -> bytes:
    """The first frames that we send: our SETTINGS, and the connection's window, which has no setting."""
    ours = limits.http2
    entries = (
        (MAX_CONCURRENT_STREAMS, ours.max_concurrent_streams),
        (INITIAL_WINDOW_SIZE, ours.initial_window_bytes),
        (MAX_FRAME_SIZE, ours.max_frame_bytes),
        (MAX_HEADER_LIST_SIZE, limits.head.max_http2_list_bytes),
    )
    sent = frame(SETTINGS, 0, 0, b"".join([_ENTRY.pack(*entry) for entry in entries]))
    increment = ours.connection_window_bytes - DEFAULT_WINDOW_BYTES
    return sent + window_update(0, increment) if increment > 0 else sent


def check_size(num_bytes: int, max_entries: int) -> None:
    """Raises ConnectionFault for SETTINGS with an unreasonable number of entries."""
    if num_bytes > max_entries * _ENTRY.size:
        raise too_much(Violation.TOO_MANY_SETTINGS)


def read_settings(payload: bytes, max_entries: int) -> list[tuple[int, int]]:
    """The entries of the peer's SETTINGS in their order. Raises ConnectionFault for invalid values."""
    if len(payload) % _ENTRY.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, not a multiple of 6")
    check_size(len(payload), max_entries)
    entries = list(_ENTRY.iter_unpack(payload))
    for identifier, value in entries:
        _check(identifier, value)
    return entries


def _check(identifier: int, value: int) -> None:
    if identifier == ENABLE_PUSH and value > 1:
        raise protocol_fault(f"SETTINGS_ENABLE_PUSH must be 0 or 1, got {value}")
    if identifier == INITIAL_WINDOW_SIZE and value > MAX_31_BITS:
        raise ConnectionFault(
            ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE must be below 2^31, got {value}"
        )
    if identifier == MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
        raise protocol_fault(f"SETTINGS_MAX_FRAME_SIZE must be from 2^14 to 2^24-1, got {value}")
