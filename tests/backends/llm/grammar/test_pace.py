"""Compilers take turns, and end in time."""

from __future__ import annotations

import threading

import pytest
from modelserver_backends.llm.grammar.pace import Pace

from modelserver.errors import CancelledError, InvalidArgumentError


def test_only_one_works_at_a_time_and_all_get_their_turns() -> None:
    working, most, looks = 0, 0, [0, 0, 0]
    are_all_seen = threading.Event()

    def work(number: int) -> None:
        nonlocal working, most
        with Pace() as pace:
            while not are_all_seen.is_set():
                working += 1
                most = max(most, working)
                looks[number] += 1
                if all(looks):
                    are_all_seen.set()
                working -= 1
                pace.look()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    assert are_all_seen.wait(30)
    for thread in threads:
        thread.join()
    assert most == 1


def test_the_next_one_begins_after_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="takes too long"), Pace(0.0) as pace:
        pace.look()
    with Pace() as pace:
        pace.look()


def test_what_is_no_longer_wanted_ends() -> None:
    is_cancelled = threading.Event()
    pace = Pace(is_cancelled=is_cancelled)
    pace.look()
    is_cancelled.set()
    with pytest.raises(CancelledError):
        pace.look()
