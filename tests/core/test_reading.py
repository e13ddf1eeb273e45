from __future__ import annotations

import threading

from modelserver.core.reading import Reading


def full(most: int = 2) -> Reading:
    reading = Reading(most)
    for _ in range(most):
        reading.sent()
    return reading


def waiting(reading: Reading) -> threading.Thread:
    thread = threading.Thread(target=reading.wait_for_room, name="sender")
    thread.start()
    return thread


def test_there_is_room_up_to_the_bound() -> None:
    reading = Reading(2)
    assert reading.has_room
    reading.sent()
    assert reading.has_room
    reading.sent()
    assert not reading.has_room
    reading.read()
    assert reading.has_room
    reading.wait_for_room()


def test_what_goes_beyond_the_bound_counts() -> None:
    reading = full()
    reading.sent()
    reading.read()
    assert not reading.has_room
    reading.read()
    assert reading.has_room


def test_a_sender_waits_until_the_reader_reads() -> None:
    reading = full()
    thread = waiting(reading)
    thread.join(0.02)
    assert thread.is_alive()
    reading.read()
    thread.join(10)
    assert not thread.is_alive()


def test_nobody_waits_for_a_reader_that_left_or_a_request_that_ended() -> None:
    for end in (Reading.cancel, Reading.end):
        reading = full()
        threads = [waiting(reading) for _ in range(3)]
        end(reading)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert reading.has_room


def test_room_is_told_each_time_and_a_cancel_once() -> None:
    reading = full()
    told: list[str] = []
    reading.watch(on_cancel=lambda: told.append("cancel"), on_room=lambda: told.append("room"))
    reading.read()
    reading.sent()
    reading.read()
    assert told == ["room", "room"]
    reading.cancel()
    reading.cancel()
    assert told == ["room", "room", "cancel", "room"]


def test_who_comes_after_the_cancel_is_told_at_once() -> None:
    reading = Reading()
    reading.cancel()
    told: list[str] = []
    reading.watch(on_cancel=lambda: told.append("cancel"), on_room=None)
    assert told == ["cancel"]


def test_after_the_end_nobody_is_called() -> None:
    reading = full()
    told: list[str] = []
    reading.watch(on_cancel=lambda: told.append("cancel"), on_room=lambda: told.append("room"))
    reading.end()
    reading.read()
    reading.cancel()
    assert told == []


def test_watching_one_thing_leaves_the_other() -> None:
    reading = Reading()
    told: list[str] = []
    reading.watch(on_cancel=lambda: told.append("cancel"), on_room=None)
    reading.watch(on_cancel=None, on_room=lambda: told.append("room"))
    reading.cancel()
    assert told == ["cancel", "room"]
