"""What the bench says first on an HTTP/2 connection (RFC 9113, 3.4)."""

from __future__ import annotations

import struct

from modelserver.wire.http2.frame import (
    DEFAULT_WINDOW_BYTES,
    MAX_31_BITS,
    PREFACE,
    SETTINGS,
    frame,
    window_update,
)
from modelserver.wire.http2.settings import ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE


def greeting(frame_bytes: int) -> bytes:
    """The preface, and settings that let the server send as much as it likes, in frames of up to `frame_bytes`."""
    settings = ((ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, MAX_31_BITS), (MAX_FRAME_SIZE, frame_bytes))
    payload = b"".join(struct.pack(">HI", *setting) for setting in settings)
    return PREFACE + frame(SETTINGS, 0, 0, payload) + window_update(0, MAX_31_BITS - DEFAULT_WINDOW_BYTES)
