"""Large bodies that stop, beside others that come: the budget is for those who use it."""

from __future__ import annotations

import pytest
from support.http2_frames import data, headers
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer, call_fields, prefixed
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import TimeLimits, WireLimits

MIB = 1 << 20
# However long the test takes, no body is ended for its pace.
LIMITS = WireLimits(max_assembly_bytes=8 * MIB, times=TimeLimits(body_pause_s=36_000, body_window_s=36_000))


def _stop_within_bodies(wire: RunningWire, count: int) -> list[Http1Peer]:
    """As many as fit: 2 MiB of each count."""
    peers = [Http1Peer(wire.address) for _ in range(count)]
    for number, peer in enumerate(peers, 1):
        peer.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 62914560\r\n\r\n" + bytes(3 * MIB))
        wire.until(lambda: wire.context.assembly.num_bytes == number * 2 * MIB, "it was received")  # noqa: B023
    return peers


def _stop_within_messages(wire: RunningWire, count: int, method: str) -> Peer:
    peer = Peer(wire.address)
    for number in range(count):
        stream_id = 2 * number + 1
        peer.send(headers(stream_id, call_fields(method), end=False))
        peer.send(data(stream_id, prefixed(bytes(MIB // 2), length=60 * MIB)))
        peer.until(
            lambda: sum(i for s, i in peer.window_updates if s == stream_id) >= 30 * MIB,  # noqa: B023
            "room for the message",
        )
        for _ in range(5):
            peer.send(data(stream_id, bytes(MIB // 2)))
        wire.until(lambda: wire.context.assembly.num_bytes == (number + 1) * 2 * MIB, "it was received")  # noqa: B023
    return peer


def _go_on_later(wire: RunningWire) -> None:
    """For the loop it is ten minutes later: what has stopped came slowly, however busy the machine is."""
    now_s = wire.loop.time
    wire.loop.time = lambda: now_s() + 600  # type: ignore[method-assign]


def _upload(wire: RunningWire, num_bytes: int) -> int:
    with Http1Peer(wire.address) as peer:
        peer.ask("/echo", method="POST", body=bytes(num_bytes))
        return peer.read_answer().status


def test_bodies_that_stopped_give_way_to_those_that_come() -> None:
    with running_wire(limits=LIMITS) as wire:
        stopped = _stop_within_bodies(wire, 4)
        _go_on_later(wire)
        # The whole budget, so that all of them give way.
        assert _upload(wire, 9 * MIB) == 200
        for peer in stopped:
            answer = peer.read_answer()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert "others came faster" in answer.body.decode()
            peer.close()
        assert wire.violations("assembly_budget") == 4
        wire.expect_idle()
        assert wire.context.assembly.num_bytes == 0


@pytest.mark.parametrize("method", ["Echo", "Chat"])
def test_messages_that_stopped_give_way_to_those_that_come(method: str) -> None:
    with running_wire(limits=LIMITS) as wire:
        with _stop_within_messages(wire, 4, method) as stopped:
            _go_on_later(wire)
            assert _upload(wire, 9 * MIB) == 200
            stopped.until(lambda: all(stopped.answer(i).has_ended for i in (1, 3, 5, 7)), "all give way")
            assert {stopped.answer(i).grpc_status for i in (1, 3, 5, 7)} == {8}
            stopped.expect_alive()
        wire.expect_idle()
        assert wire.context.assembly.num_bytes == 0


def test_a_message_on_a_stream_must_not_stop_either() -> None:
    """Its call runs, so that nothing but the pace of the message tells."""
    with running_wire() as wire, Peer(wire.address) as slow:
        slow.send(headers(1, call_fields("Chat"), end=False), data(1, prefixed(b"half", length=100)))
        slow.expect_alive()
        wire.pass_time(29)
        slow.expect_alive()
        wire.pass_time(31)
        slow.until(lambda: slow.answer(1).has_ended, "the end of the stream")
        assert slow.answer(1).grpc_status == 4
        assert wire.violations("slow_body") == 1
