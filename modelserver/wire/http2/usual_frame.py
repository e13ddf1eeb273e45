"""The frames of small unary calls, which are nearly all frames that a server gets."""

from __future__ import annotations

from typing import Any, Final

from modelserver.core import accelerator
from modelserver.wire.http2.frame import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD_BYTES,
    HEADERS,
    MAX_31_BITS,
    WINDOW_UPDATE,
    Octets,
    unpack_head,
    unpack_u32,
)
from modelserver.wire.http2.message import PREFIX_BYTES, unpack_prefix

# Longer blocks are not remembered.
MAX_BLOCK_BYTES: Final = 512


def read_in_python(data: Octets, position: int, end: int, max_data: int) -> tuple[int, int, Any, int] | None:
    """The frame at `position`, if it is complete: its kind, its stream, its payload, and where the next one begins.

    DATA that ends a stream, of at most `max_data` bytes, with one message that is not compressed: the message. HEADERS
    in one frame that do not end the stream: the block. WINDOW_UPDATE: the increment. None for anything else.
    """
    if end - position < HEAD_BYTES:
        return None
    high, low, kind, flags, stream_id = unpack_head(data, position)
    length: int = high << 8 | low
    start = position + HEAD_BYTES
    stop = start + length
    if stop > end or stream_id > MAX_31_BITS:
        return None
    if kind == DATA:
        if flags != END_STREAM or not PREFIX_BYTES <= length <= max_data:
            return None
        is_compressed, size = unpack_prefix(data, start)
        if is_compressed or size + PREFIX_BYTES != length:
            return None
        return DATA, stream_id, bytes(data[start + PREFIX_BYTES : stop]), stop
    if kind == HEADERS and flags == END_HEADERS and length <= MAX_BLOCK_BYTES:
        return HEADERS, stream_id, bytes(data[start:stop]), stop
    if kind == WINDOW_UPDATE and length == 4:
        return WINDOW_UPDATE, stream_id, unpack_u32(data, start)[0] & MAX_31_BITS, stop
    return None


read_usual_frame: Final = accelerator.read_frame or read_in_python
