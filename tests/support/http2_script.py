"""A dialogue with a server as a list: frames to send, and what must come back, in the words of RFC 9113.

    case("5.1-idle-data", data(1, b"x"), closes(ErrorCode.PROTOCOL_ERROR))

A script says what happens on a connection whose settings both sides have acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.http2_frames import Frame
from support.raw_http2 import Answer, Peer

Expectation = Callable[[Peer], object]
Step = Frame | bytes | Expectation


def case(name: str, *steps: Step) -> Any:
    """A parameter of a test over scripts; its name begins with the section of the RFC."""
    return pytest.param(steps, id=name)


def play(peer: Peer, *steps: Step) -> None:
    """Frames that follow each other are sent together; expectations see all that came until then."""
    unsent = b""
    for step in steps:
        if callable(step):
            peer.send_bytes(unsent)
            unsent = b""
            step(peer)
        else:
            unsent += step.encode() if isinstance(step, Frame) else step
    assert not unsent, "a script ends with what the server must do"


def closes(*codes: int) -> Expectation:
    """A connection error with one of `codes`: GOAWAY, then the end."""
    return lambda peer: peer.expect_goaway(codes)


def ends() -> Expectation:
    """The connection ends, with or without GOAWAY."""
    return lambda peer: peer.expect_closed()


def resets(stream_id: int, *codes: int) -> Expectation:
    """A stream error with one of `codes`; the connection goes on."""
    return lambda peer: peer.expect_reset(stream_id, codes)


def errs(stream_id: int, *codes: int) -> Expectation:
    """A stream error or a connection error with one of `codes`."""
    return lambda peer: peer.expect_error(stream_id, codes)


def answers(stream_id: int, status: int | None = None, body: bytes | None = None) -> Expectation:
    """A complete answer."""

    def check(peer: Peer) -> None:
        answer = peer.expect_answer(stream_id)
        assert status in (None, answer.status), f"status {answer.status}, expected {status}"
        assert body is None or answer.body == body, f"body {bytes(answer.body)!r}, expected {body!r}"

    return check


def says(stream_id: int, grpc_status: int, messages: list[bytes] | None = None) -> Expectation:
    """A gRPC call that ends with this status."""

    def check(peer: Peer) -> None:
        answer = peer.expect_answer(stream_id)
        assert answer.grpc_status == grpc_status, f"status {answer.grpc_status}: {answer.grpc_message}"
        assert messages is None or answer.messages == messages

    return check


def serves() -> Expectation:
    """The connection goes on, as if nothing had happened."""
    return lambda peer: peer.expect_alive()


def keeps_silent(stream_id: int) -> Expectation:
    """The connection goes on, and the stream is neither answered nor reset."""
    return lambda peer: peer.expect_nothing_on(stream_id)


def has_sent(stream_id: int, num_bytes: int) -> Expectation:
    """The body of the stream's answer has this many bytes by now, and no more come."""

    def check(peer: Peer) -> None:
        def received() -> Answer:
            return peer.answer(stream_id)

        peer.until(lambda: len(received().body) >= num_bytes, f"{num_bytes} bytes on stream {stream_id}")
        peer.expect_alive()
        assert len(received().body) == num_bytes, f"{len(received().body)} bytes, expected {num_bytes}"

    return check
