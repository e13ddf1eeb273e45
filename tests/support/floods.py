"""Floods of HTTP/2 frames that cost a peer little, and what ends each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from support.http2_frames import (
    MAX_WINDOW_BYTES,
    ErrorCode,
    Frame,
    block,
    continuation,
    data,
    encode,
    headers,
    ping,
    priority,
    rst_stream,
    settings,
    window_update,
)
from support.raw_http2 import call_fields, get_fields, prefixed

CALM = ErrorCode.ENHANCE_YOUR_CALM
GET = block(get_fields())
ECHO = block(call_fields("Echo"))
HOLD = block(call_fields("Hold"))
MESSAGE = prefixed(b"a message")


def odd(count: int, first: int = 1) -> Iterable[int]:
    return range(first, first + 2 * count, 2)


def each(count: int, make: Callable[[int], list[Frame]]) -> bytes:
    """The frames of `count` streams, one after the other."""
    return b"".join(encode(make(stream_id)) for stream_id in odd(count))


def open_call(*more: Frame, block: bytes = ECHO) -> bytes:
    """A call whose message does not end, and then `more`."""
    return encode([headers(1, block, end=False), data(1, prefixed(b"", length=1 << 20)), *more])


# What is sent after the handshake, the code of the GOAWAY that ends it, and the reason that is counted.
FLOODS: dict[str, tuple[bytes, int, str]] = {
    # Streams that are opened and reset at once: work for nothing (CVE-2023-44487).
    "rapid-reset": (each(2000, lambda i: [headers(i, ECHO, end=False), rst_stream(i)]), CALM, "too_many_resets"),
    "rapid-reset-of-running-calls": (
        each(2000, lambda i: [headers(i, HOLD, end=False), data(i, MESSAGE, end=True), rst_stream(i)]),
        CALM,
        "too_many_resets",
    ),
    "rapid-reset-of-http": (
        each(2000, lambda i: [headers(i, block(get_fields("/hold"))), rst_stream(i)]),
        CALM,
        "too_many_resets",
    ),
    # The same, but it is the server that is made to reset (CVE-2025-8671).
    "made-you-reset-by-overflow": (
        each(2000, lambda i: [headers(i, HOLD, end=False), window_update(i, MAX_WINDOW_BYTES)]),
        CALM,
        "too_many_resets",
    ),
    "made-you-reset-by-zero-increment": (
        each(2000, lambda i: [headers(i, HOLD, end=False), window_update(i, 0)]),
        ErrorCode.PROTOCOL_ERROR,
        "protocol_error",
    ),
    "made-you-reset-by-data-after-the-end": (
        each(2000, lambda i: [headers(i, HOLD, end=False), data(i, MESSAGE, end=True), data(i, b"more")]),
        ErrorCode.STREAM_CLOSED,
        "protocol_error",
    ),
    "made-you-reset-by-content-length": (
        each(2000, lambda i: [headers(i, get_fields("/hold", ("content-length", "1")), end=False), data(i, b"more")]),
        ErrorCode.PROTOCOL_ERROR,
        "protocol_error",
    ),
    "malformed-requests": (each(2000, lambda i: [headers(i, [(":method", "GET")])]), CALM, "too_many_resets"),
    "continuations": (
        encode([headers(1, GET, end_headers=False), *[continuation(1, b"\x82", end_headers=False)] * 1000]),
        CALM,
        "too_many_continuations",
    ),
    "empty-continuations": (
        encode([headers(1, GET, end_headers=False), *[continuation(1, end_headers=False)] * 1000]),
        CALM,
        "too_many_continuations",
    ),
    "large-continuations": (
        encode([headers(1, GET, end_headers=False), *[continuation(1, bytes(16384), end_headers=False)] * 10]),
        CALM,
        "too_many_continuations",
    ),
    # Without a call a client has no reason to ping.
    "pings": (encode([ping()] * 3000), CALM, "too_many_pings"),
    # While it has some, pings are borne, but not thousands at a time.
    "settings": (encode([settings()] * 5000), CALM, "too_many_control_frames"),
    "entries-of-settings": (encode([settings([(0xFF, 1)] * 33)]), CALM, "too_many_settings"),
    "empty-data": (open_call(*[data(1)] * 1000), CALM, "too_many_glitches"),
    "empty-data-with-padding": (open_call(*[data(1, padding=0)] * 10000), CALM, "too_many_glitches"),
    "one-byte-data": (open_call(*[data(1, b"x")] * 10000), CALM, "too_many_glitches"),
    "one-byte-data-of-http": (
        encode([headers(1, get_fields("/echo", method="POST"), end=False), *[data(1, b"x")] * 10000]),
        CALM,
        "too_many_glitches",
    ),
    "priorities": (encode([priority(2 * index + 1) for index in range(5000)]), CALM, "too_many_glitches"),
    "window-updates": (encode([window_update(0, 1)] * 5000), CALM, "too_many_glitches"),
    "window-updates-of-a-stream": (open_call(*[window_update(1, 1)] * 5000), CALM, "too_many_glitches"),
    "window-updates-of-a-closed-stream": (
        open_call(rst_stream(1), *[window_update(1, 1)] * 5000),
        CALM,
        "too_many_glitches",
    ),
    "unknown-frames": (encode([Frame(0x42, 0, 0, b"?")] * 5000), CALM, "too_many_glitches"),
    "resets-of-closed-streams": (
        encode([headers(1, ECHO, end=False), *[rst_stream(1)] * 20000]),
        CALM,
        "too_many_glitches",
    ),
    "streams-that-do-not-end": (each(3000, lambda i: [headers(i, ECHO, end=False)]), CALM, "too_many_resets"),
    # One entry of 4 KB in the table, then thousands of references to it in one block.
    "header-bomb": (
        encode(
            [
                headers(1, GET + b"\x40\x01a\x7f\x81\x1e" + b"v" * 3968),
                *(headers(i, GET + b"\xbe" * 16000) for i in odd(300, 3)),
            ]
        ),
        ErrorCode.COMPRESSION_ERROR,
        "compression_error",
    ),
    "tiny-fields": (
        each(300, lambda i: [headers(i, GET + b"\x00\x01a\x01b" * 4000)]),
        ErrorCode.COMPRESSION_ERROR,
        "compression_error",
    ),
}
