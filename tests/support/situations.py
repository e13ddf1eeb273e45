"""What a client may be in the middle of when it leaves: 64 calls of one kind, over HTTP/2."""

from __future__ import annotations

from collections.abc import Callable

from support.http2_frames import data, headers
from support.raw_http2 import Peer, call_fields, prefixed

MIB = 1 << 20
NUM_CALLS = 64


def held(peer: Peer) -> None:
    """Calls that run."""
    for stream_id in range(1, 2 * NUM_CALLS, 2):
        peer.call(stream_id, "Hold", b"abc")


def half_received(peer: Peer) -> None:
    """Calls whose message is on its way."""
    for stream_id in range(1, 2 * NUM_CALLS, 2):
        peer.send(headers(stream_id, call_fields("Hold"), end=False), data(stream_id, prefixed(b"half", length=MIB)))


def half_sent(peer: Peer) -> None:
    """Calls whose answers wait for the window."""
    for stream_id in range(1, 2 * NUM_CALLS, 2):
        peer.call(stream_id, "Size", b"%d" % MIB)


def streaming(peer: Peer) -> None:
    for stream_id in range(1, 2 * NUM_CALLS, 2):
        peer.send(headers(stream_id, call_fields("Chat"), end=False), data(stream_id, prefixed(b"abc")))


def streaming_to_a_full_window(peer: Peer) -> None:
    for stream_id in range(1, 2 * NUM_CALLS, 2):
        peer.call(stream_id, "Count", b"100000 1000")


def over_http(peer: Peer) -> None:
    for stream_id in range(1, 2 * NUM_CALLS, 2):
        peer.get(stream_id, "/hold")


def event_streams(peer: Peer) -> None:
    for stream_id in range(1, 2 * NUM_CALLS, 2):
        peer.get(stream_id, "/pieces/100000/1000")


def open_block(peer: Peer) -> None:
    peer.send(headers(1, call_fields("Hold"), end_headers=False))


SITUATIONS: list[Callable[[Peer], None]] = [
    held,
    half_received,
    half_sent,
    streaming,
    streaming_to_a_full_window,
    over_http,
    event_streams,
    open_block,
]
