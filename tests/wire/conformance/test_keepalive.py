"""Pings and deadlines: what is borne, what is asked, and when a call has had its time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.http2_frames import ErrorCode, ping
from support.raw_http2 import Peer
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import KeepaliveLimits, WireLimits

CALM = ErrorCode.ENHANCE_YOUR_CALM


@pytest.fixture
def curious() -> Iterator[RunningWire]:
    """A port that asks silent peers soon."""
    with running_wire(limits=WireLimits(keepalive=KeepaliveLimits(ping_after_s=60, ping_timeout_s=20))) as running:
        yield running
        running.expect_idle()


def pings_until_the_end(peer: Peer) -> int:
    """How many PINGs an idle client gets answered, one by one."""
    for number in range(20):
        peer.send(ping(b"%08d" % number))
        peer.until(lambda: peer.is_closed or len(peer.pongs) == number + 1, "an answer", may_close=True)  # noqa: B023
        if peer.is_closed:
            break
    return len(peer.pongs)


def test_a_client_that_pings_for_no_reason(wire: RunningWire) -> None:
    """Clients parse these words, and double the time between their pings."""
    with Peer(wire.address) as peer:
        assert 3 <= pings_until_the_end(peer) <= 6
        assert peer.expect_goaway(CALM).debug == b"too_many_pings"
    wire.until(lambda: wire.violations("too_many_pings") >= 1, "it was counted")


def test_a_client_that_pings_beside_a_call_that_does_nothing(wire: RunningWire) -> None:
    """With a call it may ping every five minutes."""
    with Peer(wire.address) as peer:
        peer.call(1, "Hold")
        wire.until(lambda: len(wire.grpc.held) == 1, "the call is held")
        assert 3 <= pings_until_the_end(peer) <= 6
    wire.until(lambda: not wire.grpc.held, "the call was cancelled")


def test_a_client_that_pings_while_data_flows(wire: RunningWire) -> None:
    """As those do that measure the bandwidth."""
    with Peer(wire.address) as peer:
        for number in range(50):
            peer.call(2 * number + 1, "Echo", b"abc")
            peer.send(ping())
            assert peer.expect_answer(2 * number + 1).messages == [b"abc"]
        peer.until(lambda: len(peer.pongs) == 50, "all answers")
        assert not peer.goaways


def test_pings_may_be_allowed() -> None:
    limits = KeepaliveLimits(min_ping_interval_s=0, ping_without_calls=True)
    with running_wire(limits=WireLimits(keepalive=limits)) as wire, Peer(wire.address) as peer:
        assert pings_until_the_end(peer) == 20


def test_a_silent_client_with_a_call_is_asked(curious: RunningWire) -> None:
    with Peer(curious.address) as peer:
        peer.call(1, "Hold", b"abc")
        curious.until(lambda: len(curious.grpc.held) == 1, "the call is held")
        curious.pass_time(61)
        peer.until(lambda: len(peer.pings) == 1, "a PING")
        peer.send(ping(peer.pings[0], ack=True))
        peer.expect_alive()
        curious.pass_time(21)
        curious.release()
        assert peer.expect_answer(1).messages == [b"abc"]


def test_a_client_that_does_not_answer_is_given_up(curious: RunningWire) -> None:
    before = curious.grpc.num_cancelled
    with Peer(curious.address) as peer:
        peer.call(1, "Hold", b"abc")
        curious.until(lambda: len(curious.grpc.held) == 1, "the call is held")
        curious.pass_time(61)
        peer.until(lambda: len(peer.pings) == 1, "a PING")
        curious.pass_time(120)
        peer.expect_closed()
        curious.until(lambda: curious.grpc.num_cancelled == before + 1, "the handler was cancelled")
    assert curious.violations("no_ping_answer") == 1


def test_an_idle_client_is_left_in_peace(curious: RunningWire) -> None:
    with Peer(curious.address) as peer:
        curious.pass_time(61)
        peer.expect_alive()
        assert not peer.pings


@pytest.mark.parametrize("kind", ["native", "grpcio"])
def test_deadlines_are_kept(kind: str) -> None:
    """No call ends before its time, and each does after it; its handler is cancelled, if it had begun by then."""
    with running_wire(kind) as wire, Peer(wire.address) as peer:
        peer.call(1, "Echo", b"warm")
        peer.expect_answer(1)
        ended: dict[int, float] = {}
        begun = time.monotonic()
        calls = range(3, 203, 2)
        for stream_id in calls:
            peer.call(stream_id, "Hold", b"abc", ("grpc-timeout", "100m"))
        while len(ended) < len(calls):
            peer.read_frame()
            for stream_id in calls:
                if stream_id not in ended and peer.answer(stream_id).has_ended:
                    ended[stream_id] = time.monotonic()
        assert {peer.answer(stream_id).grpc_status for stream_id in calls} == {4}
        assert min(ended.values()) - begun >= 0.1
        wire.until(lambda: wire.grpc.num_cancelled == wire.grpc.num_begun > 0, "the handlers were cancelled")
