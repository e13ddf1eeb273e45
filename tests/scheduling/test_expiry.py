from __future__ import annotations

from support.batching import request

from modelserver.scheduling.expiry import ExpiryTimes
from modelserver.scheduling.queue import QueueEntry


def queued() -> QueueEntry:
    entry = QueueEntry(request(), 1, 0)
    entry.is_queued = True
    return entry


def test_due_returns_queued_entries_in_time_order() -> None:
    times = ExpiryTimes()
    late, early, gone = queued(), queued(), queued()
    for entry, expires_ns in ((late, 20), (early, 10), (gone, 5)):
        times.add(entry, expires_ns)
    gone.is_queued = False
    assert times.next_ns() == 10
    assert times.due(9) == []
    assert times.due(20) == [early, late]
    assert times.next_ns() is None


def test_entries_that_left_do_not_pile_up() -> None:
    times = ExpiryTimes()
    waiting = queued()
    times.add(waiting, 0)
    for expires_ns in range(1, 10_000):
        entry = queued()
        times.add(entry, expires_ns)
        entry.is_queued = False
    assert len(times) < 200
    assert times.due(0) == [waiting]


def test_entries_that_left_are_let_go_at_the_next_look() -> None:
    times = ExpiryTimes()
    entry = queued()
    times.add(entry, 100)
    entry.is_queued = False
    assert times.due(0) == []
    assert len(times) == 0
