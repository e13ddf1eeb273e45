"""Clients that vanish in the middle, again and again: their work is cancelled, and nothing of them is left."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from support.http2_frames import data, encode, headers, rst_stream, window_update
from support.neighbour import Neighbour
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer, call_fields, prefixed
from support.situations import NUM_CALLS, SITUATIONS, held, open_block
from support.wires import RunningWire

MIB = 1 << 20
Situation = Callable[[Peer], None]


@pytest.mark.parametrize("how", ["close", "vanish", "half_close"])
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_a_client_that_leaves(wire: RunningWire, neighbour: Neighbour, situation: Situation, how: str) -> None:
    for _ in range(3):
        peer = Peer(wire.address)
        situation(peer)
        if situation is not open_block:
            peer.expect_alive()
            wire.until(lambda: wire.counts.open_streams == NUM_CALLS, "the server has them all")
        getattr(peer, how)()
        wire.until(lambda: wire.open_connections() == 1, "the connection is gone")
        peer.close()
        neighbour.is_served()
        wire.until(lambda: wire.counts.open_streams == 0, "the streams are gone")
        wire.until(lambda: not wire.grpc.held and not wire.http.held, "the handlers were told")
        wire.until(lambda: wire.grpc.num_streams == wire.http.num_writers == 0, "the tasks have ended")


@pytest.mark.parametrize("how", ["close", "vanish"])
@pytest.mark.parametrize("request_", [b"GET /hold", b"GET /pieces/100000/1000"], ids=["waiting", "reading"])
def test_a_client_of_http1_that_leaves(wire: RunningWire, neighbour: Neighbour, request_: bytes, how: str) -> None:
    before = wire.http.num_requests
    peers = [Http1Peer(wire.address) for _ in range(8)]
    for peer in peers:
        peer.send(request_ + b" HTTP/1.1\r\nHost: test\r\n\r\n")
    wire.until(lambda: wire.http.num_requests == before + 8, "all have asked")
    for peer in peers:
        getattr(peer, how)()
    wire.until(lambda: wire.open_connections() == 1, "the connections are gone")
    wire.until(lambda: not wire.http.held and not wire.http.num_writers, "the handlers were told")


def test_answers_to_those_who_have_left_go_nowhere(wire: RunningWire, neighbour: Neighbour) -> None:
    """A handler that does not listen answers later, in vain: nothing is raised and nothing is sent."""
    with Peer(wire.address) as peer:
        held(peer)
        wire.until(lambda: len(wire.grpc.held) == NUM_CALLS, "all are held")
        calls = wire.call(lambda: list(wire.grpc.held))
        peer.send(*(rst_stream(stream_id) for stream_id in range(1, 41, 2)))
        peer.expect_alive()
        peer.vanish()
    wire.until(lambda: wire.open_connections() == 1, "the connection is gone")
    wire.call(lambda: [call.reply((call.message,)) for call in calls])


def test_an_answer_that_crosses_a_reset(wire: RunningWire, neighbour: Neighbour) -> None:
    """Both in one turn of the loop, many times: whichever comes first, the connection goes on."""
    with Peer(wire.address) as peer:
        peer.send(window_update(0, 1 << 30))
        for round_ in range(50):
            first = 1 + 8 * round_
            sent = b"".join(
                encode(
                    [headers(i, call_fields("Size"), end=False), data(i, prefixed(b"70000"), end=True), rst_stream(i)]
                )
                for i in (first, first + 2)
            )
            peer.send_bytes(sent)
            peer.call(first + 4, "Echo", b"abc")
            assert peer.expect_answer(first + 4).messages == [b"abc"]


def objects_of_the_wire() -> Counter[str]:
    """How many objects of each of the wire's classes there are."""
    gc.collect()
    kinds = (type(found) for found in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("modelserver.wire."))


@pytest.mark.slow
def test_abandonment_again_and_again(wire: RunningWire, neighbour: Neighbour) -> None:
    """1000 connections with 64 calls each that leave: no object is left of them, and no memory to speak of."""
    process = psutil.Process()

    def leave(times: int) -> int:
        for number in range(times):
            peer = Peer(wire.address)
            situation = SITUATIONS[number % len(SITUATIONS)]
            situation(peer)
            peer.vanish()
        wire.until(lambda: wire.open_connections() == 1, "all are gone")
        wire.until(lambda: wire.grpc.num_streams == wire.http.num_writers == 0, "the tasks have ended")
        return int(process.memory_info().rss)

    settled = leave(200)
    before = objects_of_the_wire()
    grown = leave(800) - settled
    more = objects_of_the_wire() - before
    # What a turn of the loop, or the arena, still holds.
    assert sum(more.values()) < 50, more
    assert grown < 100 * MIB, f"{grown / MIB:.0f} MiB more after 800 further connections"
