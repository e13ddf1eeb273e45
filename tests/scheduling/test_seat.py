from __future__ import annotations

import threading

from modelserver.scheduling.seat import IdleSeats, ThreadSeat


def parked(idle: IdleSeats, wait_until_ns: int | None = None) -> ThreadSeat:
    seat = ThreadSeat()
    idle.park(seat, wait_until_ns)
    return seat


def test_one_seat_watches_and_is_woken_first() -> None:
    idle = IdleSeats()
    watcher, other = parked(idle, 100), ThreadSeat()
    assert idle.park(other, 100) is None
    assert idle.is_watched
    idle.wake_one()
    assert watcher.is_woken
    assert not idle.is_watched
    assert not idle.can_wake, "one woken worker is enough"
    idle.unpark(watcher)
    assert idle.can_wake


def test_the_seat_that_slept_last_is_woken() -> None:
    idle = IdleSeats()
    seats = [parked(idle) for _ in range(3)]
    idle.wake_one()
    assert [seat.is_woken for seat in seats] == [False, False, True]


def test_a_wake_that_meets_the_end_of_the_sleep_is_not_heard_twice() -> None:
    idle = IdleSeats()
    seat = parked(idle, 1)
    seat.sleep(1)
    idle.wake(seat)
    idle.unpark(seat)
    idle.park(seat, None)
    idle.wake(seat)  # raises if the first signal were still there
    seat.sleep(None)


def test_sleep_ends_with_a_wake() -> None:
    idle = IdleSeats()
    seat = parked(idle)
    thread = threading.Thread(target=seat.sleep, args=(None,))
    thread.start()
    idle.wake_one()
    thread.join(10)
    assert not thread.is_alive()
