"""Peers that take their time over HTTP/2: bodies that do not come, answers that are not read, windows that stay shut.

Time passes by `wire.pass_time`, so nothing here waits for a limit.
"""

from __future__ import annotations

import pytest
from support.http2_frames import ErrorCode, Setting, block, data, headers, ping, settings, window_update
from support.neighbour import Neighbour
from support.raw_http2 import Peer, call_fields, get_fields, prefixed
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import WireLimits

MIB = 1 << 20
ECHO = block(call_fields("Echo"))
SIZE = block(call_fields("Size"))
POST = block(get_fields("/echo", method="POST"))


@pytest.mark.parametrize("head", [ECHO, POST], ids=["grpc", "http"])
def test_a_body_that_does_not_go_on(wire: RunningWire, neighbour: Neighbour, head: bytes) -> None:
    before = wire.violations("slow_body")
    with Peer(wire.address) as slow:
        slow.send(headers(1, head, end=False), data(1, prefixed(b"half", length=100)))
        slow.expect_alive()
        wire.pass_time(29)
        slow.expect_nothing_on(1)
        wire.pass_time(31)
        slow.until(lambda: slow.answer(1).has_ended or 1 in slow.resets, "the end of the stream")
        wire.until(lambda: wire.counts.open_streams == 0, "the stream was closed")
    assert wire.violations("slow_body") == before + 1


def test_a_stream_of_messages_may_pause(wire: RunningWire, neighbour: Neighbour) -> None:
    """Between two messages a client may take as long as it likes."""
    with Peer(wire.address) as slow:
        slow.send(headers(1, call_fields("Chat"), end=False), data(1, prefixed(b"one")))
        slow.until(lambda: slow.answer(1).messages == [b"one"], "the first answer")
        wire.pass_time(500)
        slow.send(data(1, prefixed(b"two"), end=True))
        assert slow.expect_answer(1).messages == [b"one", b"two"]


def test_zero_windows(wire: RunningWire, neighbour: Neighbour) -> None:
    """100 answers of 1 MiB that nobody lets out: over 64 MiB no call is taken any more, and in the end all go."""
    before = wire.violations("slow_reader")
    with Peer(wire.address, announces={Setting.INITIAL_WINDOW_SIZE: 0}) as stalled:
        for stream_id in range(1, 201, 2):
            stalled.call(stream_id, "Size", b"%d" % MIB)
        stalled.expect_alive()
        neighbour.is_served()
        assert wire.counts.open_streams == 64
        assert list(stalled.resets.values()) == [ErrorCode.REFUSED_STREAM] * 36
        wire.pass_time(55)
        stalled.expect_alive()
        assert len(stalled.resets) == 36
        wire.pass_time(61)
        stalled.until(lambda: len(stalled.resets) == 100, "the rest of 100 resets")
        assert list(stalled.resets.values())[36:] == [ErrorCode.CANCEL] * 64
        wire.until(lambda: wire.counts.open_streams == 0, "the streams were closed")
        wire.until(lambda: wire.context.num_given_up_bytes < MIB, "their memory was given back")
        stalled.send(settings({Setting.INITIAL_WINDOW_SIZE: 1 << 16}))
        stalled.call(201, "Echo", b"abc")
        assert stalled.expect_answer(201).messages == [b"abc"]
    assert wire.violations("slow_reader") > before


def test_a_window_that_opens_byte_by_byte_is_progress(wire: RunningWire, neighbour: Neighbour) -> None:
    with Peer(wire.address, announces={Setting.INITIAL_WINDOW_SIZE: 1}) as slow:
        slow.call(1, "Size", b"20")
        for count in range(1, 20):
            slow.until(lambda: len(slow.answer(1).body) == count, "one more byte")  # noqa: B023
            wire.pass_time(40)
            slow.send(window_update(1, 1))
        slow.send(window_update(1, 100))
        assert slow.expect_answer(1).messages == [bytes(20)]


def test_a_stalled_connection_holds_up_no_other(wire: RunningWire, neighbour: Neighbour) -> None:
    """A peer with open windows that does not read its socket: answers wait by reference, and it is cut in the end."""
    before = wire.violations("slow_reader")
    windows = {Setting.INITIAL_WINDOW_SIZE: 1 << 30}
    with Peer(wire.address, announces=windows, receive_buffer_bytes=4096) as stalled:
        stalled.send(window_update(0, 1 << 30))
        for stream_id in range(1, 81, 2):
            stalled.call(stream_id, "Size", b"%d" % MIB)
        neighbour.is_served()
        wire.pass_time(61)
        wire.until(lambda: wire.open_connections() == 1, "the stalled connection was cut")
    assert wire.violations("slow_reader") == before + 1


def test_a_connection_with_much_to_send_takes_no_further_calls() -> None:
    """They are refused, so that clients may go elsewhere; as soon as there is room they are taken again."""
    with running_wire(limits=WireLimits(max_queued_bytes=4 * MIB)) as wire:
        with Peer(wire.address, announces={Setting.INITIAL_WINDOW_SIZE: 0}) as greedy:
            for stream_id in range(1, 41, 2):
                greedy.call(stream_id, "Size", b"%d" % MIB)
            greedy.expect_alive()
            assert set(greedy.resets.values()) == {ErrorCode.REFUSED_STREAM}
            taken = [stream_id for stream_id in range(1, 41, 2) if stream_id not in greedy.resets]
            assert len(taken) == 4
            with Peer(wire.address) as other:
                Neighbour(other).is_served()
            greedy.send(settings({Setting.INITIAL_WINDOW_SIZE: 2 * MIB}), window_update(0, 1 << 30))
            for stream_id in taken:
                assert len(greedy.expect_answer(stream_id).body) == MIB + 5
            greedy.call(41, "Echo", b"abc")
            assert greedy.expect_answer(41).messages == [b"abc"]
        wire.expect_idle()


def test_a_slow_reader_of_a_stream(wire: RunningWire, neighbour: Neighbour) -> None:
    """A handler that streams waits for the client: what it has not sent is not produced."""
    with Peer(wire.address) as slow:
        slow.call(1, "Count", b"100000 1000")
        slow.until(lambda: len(slow.answer(1).body) == 65535, "a full window")
        slow.expect_alive()
        assert wire.grpc.num_sent < 65535 / 1000 + 300
    wire.until(lambda: wire.grpc.num_streams == 0, "the handler was cancelled")


def test_an_unread_event_stream(wire: RunningWire, neighbour: Neighbour) -> None:
    before = wire.http.num_pieces
    with Peer(wire.address) as slow:
        slow.get(1, "/pieces/100000/1000")
        slow.until(lambda: len(slow.answer(1).body) == 65535, "a full window")
        slow.expect_alive()
        assert wire.http.num_pieces - before < 65535 / 1000 + 300
    wire.until(lambda: wire.http.num_writers == 0, "the handler was told")


def test_a_handler_that_does_not_read_stops_the_client(wire: RunningWire, neighbour: Neighbour) -> None:
    """Credit comes back as messages are consumed: what waits for a handler is bounded by the window."""
    with Peer(wire.address) as fast:
        fast.send(headers(1, call_fields("Deaf"), end=False))
        piece = data(1, prefixed(bytes(16379))).encode()
        for _ in range(64):
            fast.send_bytes(piece)
        fast.expect_alive()
        credit = sum(increment for stream_id, increment in fast.window_updates if stream_id == 1)
        assert credit <= MIB
        fast.send_bytes(piece * (credit // len(piece) + 70))
        fast.expect_error(1, ErrorCode.FLOW_CONTROL_ERROR)


def test_huge_announced_messages(wire: RunningWire, neighbour: Neighbour) -> None:
    """100 calls that each announce 1 GiB cost what has come of them."""
    with Peer(wire.address) as liar:
        for stream_id in range(1, 201, 2):
            liar.send(headers(stream_id, ECHO, end=False), data(stream_id, prefixed(b"x" * 100, length=1 << 30)))
        liar.expect_alive()
        neighbour.is_served()
        assert wire.context.assembly.num_bytes == 0
    wire.until(lambda: wire.counts.open_streams == 0, "the streams were closed")


def test_the_budget_of_requests_in_assembly() -> None:
    """Beyond it large messages are refused with RESOURCE_EXHAUSTED, small ones are not; what is given up is free."""
    with running_wire(limits=WireLimits(max_assembly_bytes=8 * MIB)) as wire:
        with Peer(wire.address) as greedy:
            for stream_id in (1, 3, 5, 7):
                greedy.send(headers(stream_id, ECHO, end=False))
                greedy.send(data(stream_id, prefixed(bytes(MIB // 2), length=6 * MIB)))
                greedy.until(
                    lambda: sum(i for s, i in greedy.window_updates if s == stream_id) >= 5 * MIB,  # noqa: B023
                    "room for the message",
                )
            for stream_id in (1, 3, 5, 7):
                for _ in range(8):
                    greedy.send(data(stream_id, bytes(MIB // 2)))
            # 3.5 MiB of each count, so two of them fit, and the third is the one that may go over.
            greedy.until(lambda: greedy.answer(7).fields is not None, "a refusal")
            assert greedy.answer(7).grpc_status == 8
            assert wire.violations("assembly_budget") == 1
            with Peer(wire.address) as other:
                Neighbour(other).is_served()
        wire.expect_idle()
        assert wire.context.assembly.num_bytes == 0


def test_an_idle_connection_is_told_and_closed(wire: RunningWire) -> None:
    with Peer(wire.address) as idle:
        wire.pass_time(3590)
        idle.call(1, "Echo", b"abc")
        assert idle.expect_answer(1).messages == [b"abc"]
        assert not idle.goaways
        wire.pass_time(3601)
        idle.until(lambda: bool(idle.pings), "a GOAWAY that leaves time for what is on its way, and a PING")
        assert [told.last_stream_id for told in idle.goaways] == [(1 << 31) - 1]
        idle.send(ping(idle.pings[0], ack=True))
        assert idle.expect_goaway(ErrorCode.NO_ERROR).last_stream_id == 1
    wire.expect_idle()


def test_a_connection_with_a_call_is_not_idle(wire: RunningWire) -> None:
    with Peer(wire.address) as busy:
        busy.call(1, "Hold", b"abc")
        wire.until(lambda: len(wire.grpc.held) == 1, "the call runs")
        wire.pass_time(3601)
        wire.release()
        assert busy.expect_answer(1).messages == [b"abc"]
        busy.send(ping())
        busy.until(lambda: bool(busy.pongs), "an answer to PING")
