from __future__ import annotations

import threading

from modelserver.scheduling.parked_workers import ParkedWorkers, WaitingThread


def parked(idle: ParkedWorkers, wait_until_ns: int | None = None) -> WaitingThread:
    worker = WaitingThread()
    idle.park(worker, wait_until_ns)
    return worker


def test_one_seat_watches_and_is_woken_first() -> None:
    idle = ParkedWorkers()
    watcher, other = parked(idle, 100), WaitingThread()
    assert idle.park(other, 100) is None
    assert idle.is_watched
    idle.wake_one()
    assert watcher.is_woken
    assert not idle.is_watched
    assert not idle.can_wake, "one woken worker is enough"
    idle.unpark(watcher)
    assert idle.can_wake


def test_the_seat_that_slept_last_is_woken() -> None:
    idle = ParkedWorkers()
    workers = [parked(idle) for _ in range(3)]
    idle.wake_one()
    assert [worker.is_woken for worker in workers] == [False, False, True]


def test_a_wake_that_meets_the_end_of_the_sleep_is_not_heard_twice() -> None:
    idle = ParkedWorkers()
    worker = parked(idle, 1)
    worker.sleep(1)
    idle.wake(worker)
    idle.unpark(worker)
    idle.park(worker, None)
    idle.wake(worker)  # raises if the first signal were still there
    worker.sleep(None)


def test_sleep_ends_with_a_wake() -> None:
    idle = ParkedWorkers()
    worker = parked(idle)
    thread = threading.Thread(target=worker.sleep, args=(None,))
    thread.start()
    idle.wake_one()
    thread.join(10)
    assert not thread.is_alive()
