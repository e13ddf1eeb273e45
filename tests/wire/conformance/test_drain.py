"""How connections end when the server wants it: at its stop, or because they are old. No request is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import grpc
import pytest
from support.http2_frames import MAX_WINDOW_BYTES, ErrorCode, data, headers, ping
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer, call_fields, prefixed
from support.wires import RunningWire, running_wire

from modelserver.wire.http2.frame import PREFACE, SETTINGS, frame
from modelserver.wire.limits import KeepaliveLimits, TimeLimits, WireLimits

# Less than any other patience, so that nothing else ends in time that passes.
AGE_S = 20.0
AGEING = WireLimits(
    times=TimeLimits(head_s=60.0, first_settings_s=60.0),
    keepalive=KeepaliveLimits(max_age_s=AGE_S, max_age_grace_s=None),
)


@pytest.fixture(params=["asyncio", "uvloop"])
def ageing(request: pytest.FixtureRequest) -> Iterator[RunningWire]:
    """A port whose connections become no older than `AGE_S`."""
    with running_wire(loop=request.param, limits=AGEING) as running:
        yield running
        running.expect_idle()


def grow_old(wire: RunningWire) -> None:
    wire.pass_time(1.2 * AGE_S)


def test_goaway_comes_in_two_steps(ageing: RunningWire) -> None:
    """Between them, what the client sent before it knew is served; after them, nothing new is."""
    with Peer(ageing.address) as peer:
        peer.call(1, "Hold", b"first")
        ageing.until(lambda: len(ageing.grpc.held) == 1, "the call is held")
        grow_old(ageing)
        peer.until(lambda: bool(peer.goaways and peer.pings), "the first GOAWAY and a PING")
        assert (peer.goaways[0].last_stream_id, peer.goaways[0].code) == (MAX_WINDOW_BYTES, ErrorCode.NO_ERROR)
        peer.call(3, "Echo", b"in time")
        assert peer.expect_answer(3).messages == [b"in time"]
        peer.send(ping(peer.pings[0], ack=True))
        peer.until(lambda: len(peer.goaways) == 2, "the second GOAWAY")
        assert (peer.goaways[1].last_stream_id, peer.goaways[1].code) == (3, ErrorCode.NO_ERROR)
        peer.call(5, "Echo", b"too late")
        ageing.release()
        assert peer.expect_answer(1).messages == [b"first"]
        peer.expect_closed()
        assert peer.answer(5).fields is None
        assert 5 not in peer.resets


def test_age_ends_no_connection_that_has_just_begun(ageing: RunningWire) -> None:
    """A client whose preface, or whose first SETTINGS, are on their way while others grow old is served."""
    preface, settings = PREFACE, frame(SETTINGS, 0, 0, b"")
    for sent, rest in ((b"", preface + settings), (preface, settings), (preface[:9], preface[9:] + settings)):
        with socket.create_connection(ageing.address, timeout=10) as connection:
            connection.sendall(sent)
            ageing.until(lambda: ageing.open_connections() == 1, "it is accepted")
            grow_old(ageing)
            connection.sendall(rest)
            # Our SETTINGS, and not the end of the connection.
            assert connection.recv(9)[3:4] == bytes([SETTINGS])
        ageing.until(lambda: ageing.open_connections() == 0, "it is gone")


def test_messages_of_an_old_connection_arrive(ageing: RunningWire) -> None:
    """A stream and a half-received request go on until they are done."""
    with Peer(ageing.address) as peer:
        peer.send(headers(1, call_fields("Chat"), end=False), data(1, prefixed(b"one")))
        peer.send(headers(3, call_fields("Echo"), end=False), data(3, prefixed(b"whole")[:6]))
        peer.until(lambda: peer.answer(1).messages == [b"one"], "the first answer")
        grow_old(ageing)
        peer.until(lambda: bool(peer.pings), "a PING")
        peer.send(ping(peer.pings[0], ack=True))
        peer.until(lambda: len(peer.goaways) == 2, "the second GOAWAY")
        peer.send(data(3, prefixed(b"whole")[6:], end=True), data(1, prefixed(b"two"), end=True))
        assert peer.expect_answer(3).messages == [b"whole"]
        assert peer.expect_answer(1).messages == [b"one", b"two"]
        peer.expect_closed()


def test_an_idle_connection_of_old_age_is_closed(ageing: RunningWire) -> None:
    with Peer(ageing.address) as peer:
        grow_old(ageing)
        peer.until(lambda: bool(peer.pings), "a PING")
        peer.send(ping(peer.pings[0], ack=True))
        assert peer.expect_goaway(ErrorCode.NO_ERROR).last_stream_id == 0


def test_the_grace_of_old_connections_ends() -> None:
    limits = WireLimits(keepalive=KeepaliveLimits(max_age_s=AGE_S, max_age_grace_s=0.05))
    with running_wire(limits=limits) as wire, Peer(wire.address) as peer:
        peer.call(1, "Hold", b"abc")
        wire.until(lambda: len(wire.grpc.held) == 1, "the call is held")
        grow_old(wire)
        peer.expect_closed()
        wire.until(lambda: wire.grpc.num_cancelled == 1, "the handler was cancelled")


def test_no_call_fails_while_connections_age(ageing: RunningWire) -> None:
    """Eight channels of grpcio, whose connections are told to leave again and again."""
    stop = threading.Event()
    failures: list[str] = []
    num_calls = [0] * 8

    def call(index: int) -> None:
        # Each with a connection of its own.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(ageing.url, options) as channel:
            echo = channel.unary_unary("/test.Wire/Echo")
            while not stop.is_set():
                try:
                    assert echo(b"%d" % num_calls[index], timeout=20) == b"%d" % num_calls[index]
                except grpc.RpcError as error:
                    failures.append(f"{error.code()}: {error.details()}")
                    return
                num_calls[index] += 1

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            before = sum(num_calls)
            ageing.until(lambda: sum(num_calls) >= before + 200 or bool(failures), "calls went on")  # noqa: B023
            grow_old(ageing)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    opened = sum(count for spoken, count in ageing.counts.connections_opened.items() if spoken.value == "http2")
    assert opened > 16, "connections were told to leave"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_stop_lets_calls_finish(loop: str) -> None:
    with running_wire(loop=loop) as wire:
        with Peer(wire.address) as peer, Http1Peer(wire.address) as old, Http1Peer(wire.address) as idle:
            peer.call(1, "Hold", b"abc")
            peer.send(headers(3, call_fields("Echo"), end=False), data(3, prefixed(b"half")[:7]))
            old.ask("/hold")
            idle.ask("/")
            assert idle.read_answer().body == b"hello"
            wire.until(lambda: len(wire.grpc.held) == len(wire.http.held) == 1, "both are held")
            stopped = threading.Thread(target=lambda: wire.call(lambda: wire.server.stop(20)))
            stopped.start()
            peer.until(lambda: bool(peer.pings), "a PING")
            peer.send(ping(peer.pings[0], ack=True))
            assert idle.read_all() == b""
            with pytest.raises(ConnectionRefusedError):
                Peer(wire.address)
            peer.send(data(3, prefixed(b"half")[7:], end=True))
            assert peer.expect_answer(3).messages == [b"half"]
            wire.release()
            assert peer.expect_answer(1).messages == [b"abc"]
            answer = old.read_answer()
            assert answer.body == b"released"
            assert answer.headers["connection"] == "close"
            peer.expect_closed()
            stopped.join()
        wire.expect_idle()


def test_a_stop_does_not_wait_for_ever() -> None:
    with running_wire() as wire:
        with Peer(wire.address) as peer:
            peer.call(1, "Hold", b"abc")
            wire.until(lambda: len(wire.grpc.held) == 1, "the call is held")
            wire.call(lambda: wire.server.stop(0.05))
            peer.expect_closed()
        assert wire.grpc.num_cancelled == 1
        wire.expect_idle()


def status_of(channel: grpc.Channel) -> grpc.StatusCode:
    """How a call ends now."""
    call = channel.unary_unary("/test.Wire/Echo").future(b"abc", timeout=10)
    code: grpc.StatusCode = call.code()
    return code


def test_clients_of_a_stopping_server_hear_that_it_is_unavailable() -> None:
    with running_wire() as wire, grpc.insecure_channel(wire.url) as channel:
        assert channel.unary_unary("/test.Wire/Echo")(b"abc", timeout=10) == b"abc"
        held = channel.unary_unary("/test.Wire/Hold").future(b"held")
        wire.until(lambda: len(wire.grpc.held) == 1, "the call is held")
        stopped = threading.Thread(target=lambda: wire.call(lambda: wire.server.stop(20)))
        stopped.start()
        wire.until(lambda: status_of(channel) is grpc.StatusCode.UNAVAILABLE, "new calls are refused")
        wire.release()
        assert held.result(10) == b"held"
        stopped.join()


def test_a_client_near_the_end_of_its_ids_is_told(wire: RunningWire) -> None:
    with Peer(wire.address) as peer:
        peer.get((1 << 31) // 4 * 3 + 1)
        assert peer.expect_answer((1 << 31) // 4 * 3 + 1).body == b"hello"
        wire.pass_time(1)
        peer.until(lambda: bool(peer.pings), "a PING")
        peer.send(ping(peer.pings[0], ack=True))
        peer.expect_goaway(ErrorCode.NO_ERROR)
