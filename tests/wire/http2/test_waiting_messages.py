"""A client that streams messages faster than their handler takes them."""

from __future__ import annotations

import pytest
from fuzz.http2_connection import answer
from support import http2_frames as frames

CHAT = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Wire/Chat"),
    (":authority", "host"),
    ("content-type", "application/grpc"),
]
MESSAGE = b"\0\0\0\0\2ab"
CUT_OFF = b"\0\0\0\0\5ab"


def status_of(*said: frames.Frame) -> tuple[bytes, int]:
    """The status of the one call of a client that says this at once, and the number of messages it got."""
    start = frames.PREFACE + frames.settings().encode() + frames.headers(1, CHAT, end=False).encode()
    *messages, trailers, _ = answer([start + frames.encode(said)]).streams[1]
    assert isinstance(trailers, tuple)
    body = messages[-1] if messages else b""
    return dict(trailers)[b"grpc-status"], body.count(b"\0\0\0\0") if isinstance(body, bytes) else 0


@pytest.mark.parametrize("number", [1, 63, 64, 65, 129, 2000])
def test_every_message_is_answered(number: int) -> None:
    assert status_of(frames.data(1, MESSAGE * number, end=True)) == (b"0", number)
    one_by_one = [frames.data(1, MESSAGE) for _ in range(number)]
    assert status_of(*one_by_one, frames.data(1, end=True)) == (b"0", number)


@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 129, 2000])
def test_a_cut_off_message_is_an_error_however_many_wait_before_it(number: int) -> None:
    assert status_of(frames.data(1, MESSAGE * number + CUT_OFF, end=True)) == (b"13", number)
    assert status_of(frames.data(1, MESSAGE * number + CUT_OFF), frames.data(1, end=True)) == (b"13", number)
