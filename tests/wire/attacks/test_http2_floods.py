"""Floods of HTTP/2 frames that cost a peer little: each is ended by the limit that is there for it.

Asserted are the reason that the peer is told, the count of it, and that a client beside it is served; how long
that takes is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
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
from support.neighbour import Neighbour
from support.raw_http2 import Peer, call_fields, get_fields, prefixed
from support.wires import RunningWire

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


FLOODS = {
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
        (CALM, ErrorCode.COMPRESSION_ERROR),
        None,
    ),
}


@pytest.mark.parametrize(("flood", "codes", "reason"), FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_is_ended(
    wire: RunningWire, neighbour: Neighbour, flood: bytes, codes: int | tuple[int, ...], reason: str | None
) -> None:
    before = 0 if reason is None else wire.violations(reason)
    with Peer(wire.address) as attacker:
        attacker.send_bytes(flood)
        neighbour.is_served()
        told = attacker.expect_goaway(codes)
        if codes == CALM:
            assert told.debug == reason.encode()
    if reason is not None:
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
