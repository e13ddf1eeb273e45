"""HTTP requests over HTTP/2."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest
from support.http2_frames import ErrorCode, FrameType, Setting, data, headers, rst_stream, window_update
from support.memory_http2 import MemoryPeer, until
from support.raw_http2 import get_fields

from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import HttpResponse
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.limits import Http2Limits, WireLimits

MIB = 1 << 20


def serving(handle: Callable[[HttpExchange], None], **options: object) -> MemoryPeer:
    peer = MemoryPeer(**options)  # type: ignore[arg-type]
    peer.http.handle = handle  # type: ignore[method-assign]
    return peer


async def test_a_request_and_its_answer() -> None:
    peer = MemoryPeer()
    peer.get(1, "/head?a=1", ("x-key", "value"))
    answer = peer.answer(1)
    found = json.loads(bytes(answer.body))
    assert (found["method"], found["path"], found["query"]) == ("GET", "/head", "a=1")
    assert found["headers"]["x-key"] == "value"
    assert answer.fields is not None
    assert answer.fields["content-length"] == str(len(answer.body))


async def test_equal_requests_share_their_head() -> None:
    heads: list[object] = []
    peer = serving(lambda exchange: (heads.append(exchange.head), exchange.respond(HttpResponse()))[1])
    peer.get(1, "/x")
    peer.get(3, "/x")
    assert heads[0] is heads[1]
    assert peer.answer(3).status == 200


@pytest.mark.parametrize("size", [0, 1, 20_000, 300_000])
@pytest.mark.parametrize("has_length", [True, False])
async def test_bodies(size: int, has_length: bool) -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: MIB})
    peer.send(window_update(0, MIB))
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    fields = (("content-length", str(size)),) if has_length else ()
    peer.send(headers(1, get_fields("/echo", *fields, method="POST"), end=False))
    for start in range(0, size, 50_000):
        peer.send(data(1, body[start : start + 50_000]))
    peer.send(data(1, end=True))
    assert peer.answer(1).body == body


async def test_a_body_of_known_length_is_let_in_as_a_whole() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(initial_window_bytes=100_000)))
    peer.send(headers(1, get_fields("/echo", ("content-length", "500000"), method="POST"), end=False))
    peer.send(data(1, bytes(10)))
    (update,) = peer.of_type(FrameType.WINDOW_UPDATE, 1)
    assert update.number() == 400_000


async def test_any_other_body_is_let_in_as_it_comes() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(initial_window_bytes=100_000)))
    peer.send(headers(1, get_fields("/echo", method="POST"), end=False))
    peer.send(data(1, bytes(24_000)))
    assert not peer.of_type(FrameType.WINDOW_UPDATE, 1)
    peer.send(data(1, bytes(2000)))
    assert [frame.number() for frame in peer.of_type(FrameType.WINDOW_UPDATE, 1)] == [26_000]


@pytest.mark.parametrize("has_length", [True, False])
async def test_a_body_over_the_limit(has_length: bool) -> None:
    """An announced one is refused before it comes; what comes all the same is ignored."""
    peer = MemoryPeer(WireLimits(max_body_bytes=1000))
    fields = (("content-length", "1001"),) if has_length else ()
    peer.send(headers(1, get_fields("/echo", *fields, method="POST"), end=False))
    assert peer.answer(1).has_ended == has_length
    peer.send(data(1, bytes(600)), data(1, bytes(401)), data(1, bytes(10)))
    assert peer.answer(1).status == 413
    assert b"1000 bytes" in peer.answer(1).body
    peer.send(data(1, bytes(10)))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}
    assert peer.violations == {Violation.BODY_TOO_LARGE: 1}
    assert peer.http.num_requests == 0
    assert not peer.goaways


@pytest.mark.parametrize("lengths", [(5, 6), (5, 4), (0, 1)])
async def test_a_length_that_is_not_kept_to(lengths: tuple[int, int]) -> None:
    announced, sent = lengths
    peer = MemoryPeer()
    peer.post(1, "/echo", bytes(sent), ("content-length", str(announced)))
    assert peer.goaways[0][1] == ErrorCode.PROTOCOL_ERROR
    assert b"content-length" in peer.goaways[0][2]


async def test_head_has_the_length_and_no_body() -> None:
    peer = MemoryPeer()
    peer.get(1, "/size/1234", method="HEAD")
    answer = peer.answer(1)
    assert answer.fields is not None
    assert answer.fields["content-length"] == "1234"
    assert answer.has_ended
    assert not answer.body
    peer.get(3, "/pieces/3/10", method="HEAD")
    await peer.settle()
    assert peer.answer(3).has_ended
    assert peer.http.num_writers == 0


async def test_no_content_has_no_length() -> None:
    peer = serving(lambda exchange: exchange.respond(HttpResponse(204)))
    peer.get(1, "/")
    assert peer.answer(1).fields == {":status": "204"}


async def test_headers_of_answers_are_lower_case_and_safe() -> None:
    response = HttpResponse(200, [("X-Text", "a\r\nb: c"), ("Connection", "close"), ("Content-Length", "9")], (b"ok",))
    peer = serving(lambda exchange: exchange.respond(response))
    peer.get(1, "/")
    assert peer.answer(1).fields == {":status": "200", "x-text": "a%0D%0Ab: c", "content-length": "2"}


async def test_expectations_are_ignored() -> None:
    peer = MemoryPeer()
    peer.post(1, "/echo", b"body", ("expect", "100-continue"))
    assert peer.answer(1).body == b"body"


async def test_answers_in_pieces() -> None:
    peer = MemoryPeer()
    peer.get(1, "/pieces/3/10")
    await peer.settle()
    answer = peer.answer(1)
    assert answer.body == bytes(30)
    assert answer.has_ended
    assert answer.fields is not None
    assert "content-length" not in answer.fields


async def test_a_writer_waits_while_the_client_has_no_window() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 100})
    peer.get(1, "/pieces/100/2000")
    await peer.settle(300)
    assert peer.http.num_pieces < 50
    peer.send(window_update(1, MIB), window_update(0, MIB))
    await peer.settle(300)
    assert peer.answer(1).body == bytes(200_000)


async def test_a_writer_whose_client_leaves_is_told() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 100})
    peer.get(1, "/pieces/100/2000")
    await peer.settle(100)
    peer.send(rst_stream(1))
    await peer.settle()
    assert peer.http.num_writers == 0
    assert peer.http.num_pieces < 100
    assert peer.connection.max_open == 1000


async def test_a_client_that_leaves_is_told_of_once() -> None:
    peer = MemoryPeer()
    peer.get(1, "/hold")
    (exchange,) = peer.http.held
    peer.send(rst_stream(1))
    assert peer.http.num_disconnected == 1
    exchange.respond(HttpResponse())
    peer.leave()
    assert peer.http.num_disconnected == 1
    assert peer.connection.max_open == 1000


async def test_a_handler_that_raises_costs_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    def fall(exchange: HttpExchange) -> None:
        raise ValueError("secret")

    peer = serving(fall)
    with caplog.at_level(logging.ERROR):
        peer.get(1, "/")
    assert peer.answer(1).status == 500
    assert b"secret" not in peer.answer(1).body
    assert "Traceback" in caplog.text


async def test_a_body_that_takes_too_much_memory() -> None:
    peer = MemoryPeer(WireLimits(max_assembly_bytes=MIB))
    for stream_id in (1, 3):  # one may have more than all together should
        fields = get_fields("/echo", ("content-length", str(4 * MIB)), method="POST")
        peer.send(headers(stream_id, fields, end=False))
        for _ in range(3):
            peer.send(data(stream_id, bytes(900_000)))
    assert peer.answer(3).status == 503
    assert peer.violations == {Violation.ASSEMBLY_BUDGET: 1}
    peer.send(rst_stream(1, ErrorCode.CANCEL))
    assert peer.context.assembly.num_bytes == 0
