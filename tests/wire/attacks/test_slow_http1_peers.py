"""Peers that take their time, or never come to an end, over HTTP/1.1."""

from __future__ import annotations

import pytest
from support.neighbour import Neighbour
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import HeadLimits, WireLimits

MIB = 1 << 20
# Beginnings that their client never ends (slowloris).
HEADS = {
    "nothing": b"",
    "request-line": b"GET / HTT",
    "headers": b"GET / HTTP/1.1\r\nHost: test\r\nX-One: 1\r\n",
    "almost": b"GET / HTTP/1.1\r\nHost: test\r\n\r",
}
BODIES = {
    "length": b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\nhalf",
    "large-length": b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 1000000\r\n\r\nhalf",
    "no-byte-of-it": b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\n",
    "chunk": b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhal",
    "between-chunks": b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
}


@pytest.mark.parametrize("sent", HEADS.values(), ids=HEADS.keys())
def test_a_head_that_does_not_end(wire: RunningWire, neighbour: Neighbour, sent: bytes) -> None:
    before = wire.violations("slow_head")
    peers = [Http1Peer(wire.address) for _ in range(20)]
    for peer in peers:
        peer.send(sent)
    neighbour.is_served()
    wire.until(lambda: wire.open_connections() == 21, "all are connected")
    wire.until(lambda: all_read(wire, sent), "the beginnings were read")
    wire.pass_time(11)
    for peer in peers:
        assert peer.read_all()[:12] in (b"", b"HTTP/1.1 408")
        peer.close()
    assert wire.violations("slow_head") == before + 20


def all_read(wire: RunningWire, sent: bytes) -> bool:
    """Whether the port knows of all but its neighbour what they speak, as far as they said."""
    open_http1 = sum(count for protocol, count in wire.counts.connections_open.items() if protocol.value == "http1")
    return open_http1 == (20 if sent else 0)


def test_a_head_that_grows_byte_by_byte(wire: RunningWire, neighbour: Neighbour) -> None:
    """Progress does not help: a head has its time."""
    with Http1Peer(wire.address) as slow:
        for byte in b"GET / HTTP/1.1\r\nHost: test\r\n":
            slow.send(bytes((byte,)))
        wire.until(lambda: wire.open_connections() == 2, "it is connected")
        wire.pass_time(11)
        assert slow.read_all()[:12] in (b"", b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", BODIES.values(), ids=BODIES.keys())
def test_a_body_that_does_not_go_on(wire: RunningWire, neighbour: Neighbour, sent: bytes) -> None:
    before = wire.violations("slow_body")
    with Http1Peer(wire.address) as slow:
        slow.send(sent)
        wire.until(lambda: all_of(wire, "http1") == 1, "it is connected")
        neighbour.is_served()
        wire.pass_time(31)
        assert slow.read_all().startswith(b"HTTP/1.1 408 ")
    assert wire.violations("slow_body") == before + 1


def all_of(wire: RunningWire, protocol: str) -> int:
    return sum(count for spoken, count in wire.counts.connections_open.items() if spoken.value == protocol)


def test_a_body_that_trickles(wire: RunningWire, neighbour: Neighbour) -> None:
    """A byte now and then is no pause, but too slow over a minute."""
    before = wire.violations("slow_body")
    with Http1Peer(wire.address) as slow:
        slow.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n")
        wire.until(lambda: all_of(wire, "http1") == 1, "it is connected")
        wire.pass_time(0)
        for _ in range(4):
            slow.send(b"x")
            neighbour.is_served()
            wire.pass_time(61)
        assert slow.read_all().startswith(b"HTTP/1.1 408 ")
    assert wire.violations("slow_body") == before + 1


def test_an_answer_that_is_not_read(wire: RunningWire, neighbour: Neighbour) -> None:
    before = wire.violations("slow_reader")
    with Http1Peer(wire.address, receive_buffer_bytes=4096) as slow:
        asked = wire.http.num_requests
        slow.ask(f"/size/{32 * MIB}")
        wire.until(lambda: wire.http.num_requests > asked, "it was asked")
        neighbour.is_served()
        wire.pass_time(61)
        wire.until(lambda: all_of(wire, "http1") == 0, "the connection was cut")
        wire.until(lambda: slow.is_reset, "the reader knows")
    assert wire.violations("slow_reader") == before + 1


def test_an_event_stream_that_is_not_read(wire: RunningWire, neighbour: Neighbour) -> None:
    """What is not taken is not produced, and a reader that takes nothing is cut."""
    before = wire.http.num_pieces
    with Http1Peer(wire.address, receive_buffer_bytes=4096) as slow:
        slow.ask("/pieces/1000000/10000")
        wire.until(lambda: wire.http.num_pieces - before > 40, "more is written than the system takes")
        neighbour.is_served()
        wire.pass_time(61)
        wire.until(lambda: wire.http.num_writers == 0, "the handler was told")
    assert wire.http.num_pieces - before < 5000


def test_pipelined_requests_wait_in_the_clients_socket(wire: RunningWire, neighbour: Neighbour) -> None:
    """The first is held; 16 more are taken, and the rest is not read."""
    before = wire.http.num_requests
    with Http1Peer(wire.address) as eager:
        eager.ask("/hold")
        for _ in range(2000):
            eager.ask("/")
        neighbour.is_served()
        assert wire.http.num_requests - before < 40
        wire.release()
        assert [eager.read_answer().status for _ in range(2001)] == [200] * 2001


@pytest.mark.parametrize(
    ("more", "status", "reason"),
    [(b"", 413, "body_too_large"), (b";" + b"x" * 200, 400, "ambiguous_framing")],
    ids=["chunks", "extensions"],
)
def test_chunks_that_never_end(neighbour: Neighbour, more: bytes, status: int, reason: str) -> None:
    """Chunked bodies are held to the limit as they come, and so are the extensions that nobody reads."""
    with running_wire(limits=WireLimits(max_body_bytes=MIB)) as small:
        with Http1Peer(small.address) as endless:
            endless.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
            endless.try_send((b"1000" + more + b"\r\n" + bytes(4096) + b"\r\n") * 1000)
            assert endless.read_all().startswith(b"HTTP/1.1 %d " % status)
        small.expect_idle()
        assert small.violations(reason) == 1


def test_tiny_chunks_do_not_add_up(wire: RunningWire, neighbour: Neighbour) -> None:
    """300 000 chunks of one byte are a body of 300 kB, with bounded work for each."""
    with Http1Peer(wire.address) as tiny:
        tiny.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        tiny.try_send(b"1\r\nx\r\n" * 300_000, timeout_s=5)
        tiny.send(b"0\r\n\r\n")
        answer = tiny.read_answer()
        assert answer.status in (200, 400, 413)
        if answer.status == 200:
            assert answer.body == b"x" * 300_000


@pytest.mark.parametrize(
    ("head", "status"),
    [
        pytest.param(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: test\r\n\r\n", 414, id="target"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: test\r\nX: " + b"a" * 40000 + b"\r\n\r\n", 431, id="one-field"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: test\r\n" + b"X: a\r\n" * 101 + b"\r\n", 431, id="many-fields"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: test\r\n" + b"X: a\r\n" * 100_000, 431, id="endless"),
    ],
)
def test_heads_that_are_too_large(wire: RunningWire, neighbour: Neighbour, head: bytes, status: int) -> None:
    before = wire.violations("head_too_large")
    with Http1Peer(wire.address) as large:
        large.try_send(head, timeout_s=2)
        assert large.read_all().startswith(b"HTTP/1.1 %d " % status)
    assert wire.violations("head_too_large") == before + 1


def test_a_body_larger_than_the_limit_is_not_read() -> None:
    with running_wire(limits=WireLimits(max_body_bytes=MIB)) as wire:
        with Http1Peer(wire.address) as large:
            large.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 1000000000000\r\n\r\n")
            assert large.read_all().startswith(b"HTTP/1.1 413 ")
        assert wire.http.num_requests == 0
        assert wire.violations("body_too_large") == 1
        wire.expect_idle()


def test_the_budget_of_bodies_in_assembly() -> None:
    """Over it large bodies are refused with 503; what is given up is free again."""
    with running_wire(limits=WireLimits(max_assembly_bytes=8 * MIB)) as wire:
        peers = [Http1Peer(wire.address) for _ in range(4)]
        for peer in peers:
            peer.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 6291456\r\n\r\n")
            peer.try_send(bytes(5 * MIB), timeout_s=1.0)
        wire.until(lambda: wire.violations("assembly_budget") > 0, "a refusal")
        with Peer(wire.address) as other:
            Neighbour(other).is_served()
        for peer in peers:
            peer.close()
        wire.expect_idle()
        assert wire.context.assembly.num_bytes == 0


def test_connections_beyond_the_limit_are_told_so() -> None:
    with running_wire(limits=WireLimits(max_connections=5, head=HeadLimits())) as wire:
        peers = [Http1Peer(wire.address) for _ in range(5)]
        for peer in peers:
            peer.ask()
            assert peer.read_answer().status == 200
        with Http1Peer(wire.address) as late:
            late.ask()
            assert late.read_all().startswith(b"HTTP/1.1 503 ")
        with Peer(wire.address, shakes_hands=False) as late_call:
            late_call.send_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            late_call.expect_closed()
            assert not late_call.settings, "no word, so that clients back off"
        assert wire.violations("too_many_connections") == 2
        peers.pop().close()
        wire.until(lambda: len(wire.context.connections) == 4, "one has left, and so have those who were refused")
        with Peer(wire.address) as next_call:
            Neighbour(next_call).is_served()
        wire.until(lambda: len(wire.context.connections) == 4, "it has left, too")
        with Http1Peer(wire.address) as next_one:
            next_one.ask()
            assert next_one.read_answer().status == 200
        for peer in peers:
            peer.close()
        wire.expect_idle()


@pytest.mark.parametrize(
    "sent",
    [b"no request\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n"],
)
def test_bad_requests_of_clients_that_do_not_wait(wire: RunningWire, neighbour: Neighbour, sent: bytes) -> None:
    """The answer meets a socket that is closed, at which asyncio raises: the connection ends all the same."""
    for _ in range(50):
        hasty = Http1Peer(wire.address)
        hasty.send(sent * 10)
        hasty.close()
    wire.until(lambda: wire.open_connections() == 1, "all are gone")
