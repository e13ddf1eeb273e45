"""How the client begins a connection: the preface, then its SETTINGS (RFC 9113, 3.4)."""

from __future__ import annotations

from typing import Final

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.control import ControlFrames
from modelserver.wire.http2.frame import (
    ACK,
    HEAD_BYTES,
    PREFACE,
    SETTINGS,
    ConnectionFault,
    ErrorCode,
    Octets,
    protocol_fault,
    read_head,
)
from modelserver.wire.http2.settings import check_size

PREFACE_NAME: Final = "the preface"
FIRST_SETTINGS: Final = "the first SETTINGS"


class Preface:
    """Reads the beginning, until nothing of it is `awaited`. Raises ConnectionFault for anything else."""

    __slots__ = ("_control", "_max_settings", "awaited")

    def __init__(self, control: ControlFrames, max_settings: int) -> None:
        self._control = control
        self._max_settings = max_settings
        self.awaited: str | None = PREFACE_NAME

    def read(self, data: Octets, view: memoryview, position: int, end: int) -> int:
        """Read the available bytes; returns the position after them."""
        if self.awaited == PREFACE_NAME:
            position = self._read_preface(data, position, end)
        if self.awaited == FIRST_SETTINGS:
            position = self._read_settings(data, view, position, end)
        return position

    def _read_preface(self, data: Octets, position: int, end: int) -> int:
        begin = data[position : min(end, position + len(PREFACE))]
        if not PREFACE.startswith(begin):
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface", Violation.BAD_PREFACE
            )
        if len(begin) < len(PREFACE):
            return position
        self.awaited = FIRST_SETTINGS
        return position + len(PREFACE)

    def _read_settings(self, data: Octets, view: memoryview, position: int, end: int) -> int:
        if end - position < HEAD_BYTES:
            return position
        length, kind, flags, stream_id = read_head(data, position)
        if kind != SETTINGS or flags & ACK:
            raise protocol_fault(f"the first frame must be SETTINGS, got one of type {kind}")
        check_size(length, self._max_settings)
        stop = position + HEAD_BYTES + length
        if stop > end:
            return position
        self._control.take(kind, flags, stream_id, view[stop - length : stop].tobytes())
        self.awaited = None
        return stop
