"""Where requests go by their heads, and what is said to those that go nowhere."""

from __future__ import annotations

import pytest
from support.http2_frames import Fields, FrameType, data, headers, window_update
from support.memory_http2 import MemoryPeer
from support.raw_http2 import call_fields, get_fields, prefixed

GRPC_WEB = get_fields("/test.Wire/Echo", ("content-type", "application/grpc-web"), method="POST")


def ask(peer: MemoryPeer, fields: Fields) -> None:
    peer.send(headers(1, fields, end=False), data(1, prefixed(b"x"), end=True))


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        (call_fields("Nothing"), 12, "'/test.Wire/Nothing'"),
        (call_fields("Echo", ("grpc-timeout", "soon")), 13, "grpc-timeout"),
        (call_fields("Echo", ("x-bin", "!")), 13, "base64"),
    ],
)
async def test_calls_that_go_nowhere(fields: Fields, status: int, text: str) -> None:
    peer = MemoryPeer()
    ask(peer, fields)
    answer = peer.answer(1)
    assert (answer.status, answer.grpc_status) == (200, status)
    assert text in answer.grpc_message
    assert not peer.resets, "the client has ended"
    assert not peer.of_type(FrameType.GOAWAY)


async def test_calls_are_posted() -> None:
    peer = MemoryPeer()
    ask(peer, [(name, "PUT" if name == ":method" else value) for name, value in call_fields("Echo")])
    assert (peer.answer(1).status, peer.answer(1).grpc_status) == (405, 13)


@pytest.mark.parametrize("suffix", ["", "+proto", ";charset=utf-8"])
async def test_content_types_of_calls(suffix: str) -> None:
    peer = MemoryPeer()
    fields = [(name, value + suffix if name == "content-type" else value) for name, value in call_fields("Echo")]
    ask(peer, fields)
    assert peer.answer(1).messages == [b"x"]


async def test_content_types_that_look_like_grpc() -> None:
    peer = MemoryPeer()
    ask(peer, GRPC_WEB)
    assert peer.answer(1).status == 415
    assert b"application/grpc-web" in peer.answer(1).body


async def test_a_port_without_grpc_says_so() -> None:
    peer = MemoryPeer(has_grpc=False)
    ask(peer, call_fields("Echo"))
    assert peer.answer(1).grpc_status == 12
    assert "HTTP only" in peer.answer(1).grpc_message
    peer.get(3, "/")
    assert peer.answer(3).body == b"hello"


async def test_a_port_without_http_says_so() -> None:
    peer = MemoryPeer(has_http=False)
    peer.get(1, "/")
    assert peer.answer(1).status == 415
    assert b"gRPC only" in peer.answer(1).body
    peer.call(3, "Echo", b"x")
    assert peer.answer(3).messages == [b"x"]


async def test_the_answer_to_a_refused_upload_waits_for_its_window() -> None:
    peer = MemoryPeer(announces={4: 10}, has_http=False)
    peer.send(headers(1, get_fields("/", method="POST"), end=False))
    peer.send(data(1, bytes(1000)), data(1, bytes(1000), end=True))
    assert not peer.answer(1).has_ended
    peer.send(window_update(1, 1000))
    assert peer.answer(1).has_ended
    assert not peer.resets
