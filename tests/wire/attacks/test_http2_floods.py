"""Floods of HTTP/2 frames that cost a peer little: each is ended by the limit that is there for it.

Asserted are the reason that the peer is told, the count of it, and that a client beside it is served; how long
that takes is measured by `measure.py`.
"""

from __future__ import annotations

import pytest
from support.floods import CALM, FLOODS, HOLD, each, odd
from support.http2_frames import ErrorCode, Frame, encode, headers, ping, rst_stream, settings, window_update
from support.neighbour import Neighbour
from support.raw_http2 import Peer, get_fields
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import Http2Limits, WireLimits


@pytest.mark.parametrize(("flood", "code", "reason"), FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_is_ended(wire: RunningWire, neighbour: Neighbour, flood: bytes, code: int, reason: str) -> None:
    before = wire.violations(reason)
    with Peer(wire.address) as attacker:
        attacker.send_bytes(flood)
        neighbour.is_served()
        told = attacker.expect_goaway(code)
        assert code != CALM or told.debug == reason.encode()
    wire.until(lambda: wire.violations(reason) == before + 1, "the violation was counted, once")


def test_a_flood_of_pings_beside_a_call(wire: RunningWire, neighbour: Neighbour) -> None:
    """While data flows pings are borne, as clients measure the bandwidth by them; thousands at once are not."""
    with Peer(wire.address) as attacker:
        attacker.send(headers(1, HOLD, end=False), *[ping()] * 5000)
        assert attacker.expect_goaway(CALM).debug in (b"too_many_pings", b"too_many_control_frames")


@pytest.mark.parametrize(
    "flood", [encode([ping()] * 200_000), encode([settings()] * 200_000)], ids=["pings", "settings"]
)
def test_answers_that_nobody_reads_do_not_pile_up(wire: RunningWire, neighbour: Neighbour, flood: bytes) -> None:
    """The attacker sends as much as it can and never reads."""
    with Peer(wire.address, receive_buffer_bytes=4096) as attacker:
        attacker.try_send(flood, timeout_s=1.0)
        neighbour.is_served()
        wire.until(lambda: wire.open_connections() == 1, "the attacker was cut off")


def test_refused_streams_do_not_count_before_the_client_knows_the_limit(
    wire: RunningWire, neighbour: Neighbour
) -> None:
    """curl, h2load and nginx open streams before they have read our settings."""
    with Peer(wire.address, shakes_hands=False) as eager:
        eager.send_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings().encode())
        eager.send_bytes(each(1400, lambda i: [headers(i, HOLD, end=False)]))
        eager.until(lambda: len(eager.resets) == 400, "400 refusals")
        assert set(eager.resets.values()) == {ErrorCode.REFUSED_STREAM}
        eager.send(Frame(4, 1))
        eager.expect_alive()


def test_skipped_ids_cost_nothing(wire: RunningWire, neighbour: Neighbour) -> None:
    """Ids may skip; the hundreds of millions that were skipped are closed, and not remembered one by one."""
    with Peer(wire.address) as peer:
        for step in range(1, 6):
            peer.get(step * 400_000_001 | 1)
            assert peer.expect_answer(step * 400_000_001 | 1).status == 200
        peer.send(window_update(7, 1), rst_stream(99))
        peer.expect_alive()


def test_requests_with_costly_heads_are_taken_in_turns(wire: RunningWire, neighbour: Neighbour) -> None:
    """They are legal, so all are answered; but the client beside them gets its turn."""
    costly = [(f"x-{index}", f"{index:050}") for index in range(80)]
    with Peer(wire.address) as attacker:
        attacker.send(window_update(0, 1 << 24))
        attacker.send_bytes(b"".join(headers(i, get_fields("/", *costly, ("n", str(i)))).encode() for i in odd(900)))
        neighbour.is_served()
        for stream_id in odd(900):
            assert attacker.expect_answer(stream_id).status == 200


def test_many_connections_with_half_a_preface(wire: RunningWire, neighbour: Neighbour) -> None:
    before = wire.violations("slow_head")
    peers = [Peer(wire.address, shakes_hands=False) for _ in range(50)]
    for index, peer in enumerate(peers):
        peer.send_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: index % 24])
    neighbour.is_served()
    wire.until(lambda: wire.open_connections() == 51, "all are connected")
    wire.pass_time(11)
    for peer in peers:
        peer.expect_closed()
        peer.close()
    assert wire.violations("slow_head") == before + 50


def test_a_client_that_never_sends_settings(wire: RunningWire, neighbour: Neighbour) -> None:
    before = wire.violations("slow_head")
    with Peer(wire.address, shakes_hands=False) as peer:
        peer.send_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        peer.until(lambda: bool(peer.settings), "the server's SETTINGS")
        wire.pass_time(3)
        peer.expect_closed()
    assert wire.violations("slow_head") == before + 1


def test_handlers_that_do_not_hear_count_as_streams() -> None:
    """A call that was reset takes up one of the announced streams for as long as its handler goes on."""
    with running_wire(limits=WireLimits(http2=Http2Limits(max_concurrent_streams=10))) as wire:
        with Peer(wire.address) as peer:
            for stream_id in odd(10):
                peer.call(stream_id, "Stubborn")
            wire.until(lambda: len(wire.grpc.held) == 10, "all run")
            peer.send(*(rst_stream(stream_id) for stream_id in odd(10)))
            peer.expect_alive()
            peer.call(21, "Echo", b"one too many")
            peer.expect_reset(21, ErrorCode.REFUSED_STREAM)
            wire.release()
            peer.call(23, "Echo", b"abc")
            assert peer.expect_answer(23).messages == [b"abc"]
        wire.expect_idle()


def test_attackers_that_do_not_wait_for_the_end(wire: RunningWire, neighbour: Neighbour) -> None:
    """The last word meets a socket that is closed, at which asyncio raises: the connection ends all the same."""
    flood, _, reason = FLOODS["rapid-reset"]
    before = wire.violations(reason)
    for _ in range(50):
        attacker = Peer(wire.address)
        attacker.send_bytes(flood)
        attacker.close()
    wire.until(lambda: wire.open_connections() == 1, "all attackers are gone")
    assert wire.violations(reason) > before
