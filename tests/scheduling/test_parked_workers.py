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
    assert worker.rest(0)


def test_sleep_ends_with_a_wake() -> None:
    idle = ParkedWorkers()
    worker = parked(idle)
    thread = threading.Thread(target=worker.rest, args=(10,))
    thread.start()
    idle.wake_one()
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_that_ends_is_started_again_by_the_next_wake() -> None:
    idle, started = ParkedWorkers(), []
    worker = WaitingThread(lambda: started.append(1))
    idle.park(worker, None)
    assert not worker.rest(0)
    idle.wake_one()
    assert started == [1]


def test_each_wake_is_seen_once_whether_it_meets_the_end_of_a_thread_or_not() -> None:
    """A thread that ends at once, in a race with wakes: after each wake exactly one thread goes on."""
    idle, lock, turns = ParkedWorkers(), threading.Lock(), threading.Semaphore(0)

    def work() -> None:
        while True:
            with lock:
                idle.unpark(worker)
                idle.park(worker, None)
            turns.release()
            if not worker.rest(0):
                return

    def start() -> None:
        threading.Thread(target=work, name="worker").start()

    worker = WaitingThread(start)
    start()
    assert turns.acquire(timeout=10)
    for _ in range(3000):
        with lock:
            idle.wake_one()
        assert turns.acquire(timeout=10), "the wake was lost"
    assert not turns.acquire(blocking=False), "two threads saw one wake"
