from __future__ import annotations

import asyncio

import pytest
from support.http1_dialogue import PeerTransport

from modelserver.wire.context import TURN_BYTES, BulkTurns, Outbox
from modelserver.wire.http1.outgoing import Outgoing


def _outgoing() -> tuple[Outgoing, PeerTransport]:
    transport, loop = PeerTransport(), asyncio.get_running_loop()
    return Outgoing(transport, Outbox(loop), BulkTurns(loop)), transport


async def test_small_answers_of_a_turn_leave_in_one_write() -> None:
    outgoing, transport = _outgoing()
    for number in range(5):
        outgoing.add(b"head%d " % number, (b"body ", memoryview(b"tail ")), 10)
    assert not transport.writes
    await asyncio.sleep(0)
    assert transport.writes == [b"".join(b"head%d body tail " % number for number in range(5))]


async def test_a_lone_answer_leaves_at_once_and_with_it_what_is_due_before() -> None:
    outgoing, transport = _outgoing()
    large = bytes(100_000)
    outgoing.is_lone = True
    outgoing.add(b"head ", (b"one",), 3)
    outgoing.add(b"head ", (large,), len(large))
    assert transport.writes == [b"head one", b"head ", large]
    outgoing.is_lone = False
    outgoing.add(b"head ", (b"two",), 3)
    assert len(transport.writes) == 3
    outgoing.is_lone = True
    outgoing.add(b"head ", (b"three",), 5)
    assert transport.writes[3:] == [b"head twohead three"]
    transport.close()
    outgoing.add(b"head ", (b"four",), 4)
    await asyncio.sleep(0)
    assert len(transport.writes) == 4


async def test_large_buffers_are_written_as_they_are() -> None:
    outgoing, transport = _outgoing()
    large = bytes(100_000)
    written: list[object] = []
    transport.write = written.append  # type: ignore[method-assign]
    outgoing.add(b"head", (b"json", large, b"", b"tail"), 100_008)
    outgoing.flush()
    assert written == [b"headjson", large, b"tail"]
    assert written[1] is large


async def test_much_is_not_collected() -> None:
    outgoing, transport = _outgoing()
    outgoing.is_collecting = True
    for _ in range(10):
        outgoing.add(b"", (bytes(20_000),), 20_000)
    assert sum(map(len, transport.writes)) >= 200_000 - 64 * 1024


async def test_nothing_is_written_to_what_closes() -> None:
    outgoing, transport = _outgoing()
    transport.close()
    outgoing.add(b"head", (), 0)
    outgoing.flush()
    assert not transport.writes


async def test_who_waits_for_room_goes_on_when_there_is_some() -> None:
    outgoing, _ = _outgoing()
    await asyncio.wait_for(outgoing.room(), 60)
    outgoing.pause()
    waiting = [asyncio.ensure_future(outgoing.room()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert not waiting[1].done()
    outgoing.resume()
    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 60)


async def test_who_was_sent_much_waits_for_another_turn() -> None:
    outgoing, _ = _outgoing()
    for _ in range(3):
        outgoing.add(b"", (bytes(TURN_BYTES - 1),), TURN_BYTES - 1)
        outgoing.flush()
        assert outgoing.has_room
        outgoing.add(b"x", (), 0)
        outgoing.flush()
        assert not outgoing.has_room
        waiting = asyncio.ensure_future(outgoing.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.wait_for(waiting, 60)
        assert outgoing.has_room


async def test_a_loss_ends_the_waiting() -> None:
    outgoing, transport = _outgoing()
    outgoing.pause()
    waiting = asyncio.ensure_future(outgoing.room())
    await asyncio.sleep(0)
    outgoing.add(b"unsent", (), 0)
    outgoing.close()
    await asyncio.wait_for(waiting, 60)
    await asyncio.sleep(0)
    assert not transport.writes


async def test_a_stall_is_what_waits_and_does_not_shrink() -> None:
    outgoing, transport = _outgoing()
    transport.peer_reads = False
    outgoing.add(b"x" * 100, (), 0)
    outgoing.flush()
    assert [outgoing.stalled_s(now_s) for now_s in (0, 10)] == [0, 10]
    outgoing.add(b"x" * 100, (), 0)
    outgoing.flush()  # more is waiting: that is not progress
    assert outgoing.stalled_s(20) == 20
    transport.num_waiting -= 1
    assert outgoing.stalled_s(21) == 0
    transport.num_waiting = 0
    assert outgoing.stalled_s(90) == 0
