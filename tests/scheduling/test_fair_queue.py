"""Callers share a queue by weight, whoever sends more."""

import random
from collections import Counter

import pytest
from support.integrity import check_integrity

from modelserver.core.request import InFlightRequest
from modelserver.scheduling.fair_queue import FairQueue
from modelserver.scheduling.queue import QueueEntry


def entry(caller: str, *, share: float = 1.0, rows: int = 1, level: int = 1, key: object = None) -> QueueEntry:
    request = InFlightRequest(model_name="m", version=None, inputs={}, rows=rows, caller=caller, share=share)
    return QueueEntry(request, level, 0, key)


def drain(queue: FairQueue, number: int) -> list[str]:
    served = []
    for _ in range(number):
        first = queue.first()
        assert first is not None
        queue.remove(first)
        check_integrity(queue)
        served.append(first.request.caller)
    return served


def test_one_caller_is_served_in_the_order_of_arrival() -> None:
    queue = FairQueue()
    entries = [entry("a") for _ in range(20)]
    for each in entries:
        queue.add(each)
    assert list(queue) == entries


def test_who_sends_little_does_not_wait_for_who_sends_much() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.add(entry("hog"))
    drain(queue, 10)
    queue.add(entry("guest"))
    assert "guest" in drain(queue, 2)


@pytest.mark.parametrize(("weights", "expected"), [((1, 1), (50, 50)), ((3, 1), (75, 25)), ((0.5, 1.5), (25, 75))])
def test_shares_follow_weights(weights: tuple[float, float], expected: tuple[int, int]) -> None:
    queue = FairQueue()
    for name, weight in zip("ab", weights, strict=True):
        for _ in range(200):
            queue.add(entry(name, share=weight))
    served = Counter(drain(queue, 100))
    assert [served[name] for name in "ab"] == [pytest.approx(number, abs=1) for number in expected]


def test_rows_count_and_not_requests() -> None:
    queue = FairQueue(max_rows=4)
    for _ in range(50):
        queue.add(entry("wide", rows=4))
        queue.add(entry("thin"))
    served = Counter(drain(queue, 50))
    assert served["thin"] == pytest.approx(4 * served["wide"], abs=4)


def test_levels_come_before_shares() -> None:
    queue = FairQueue()
    for _ in range(3):
        queue.add(entry("a", level=2))
    queue.add(entry("b", level=2))
    queue.add(entry("a", level=1))
    assert [each.level for each in queue] == [1, 2, 2, 2, 2]


def test_idle_time_earns_nothing() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.add(entry("busy"))
    drain(queue, 40)
    for _ in range(20):
        queue.add(entry("late"))
    served = Counter(drain(queue, 10))
    assert served["busy"] == pytest.approx(5, abs=1)


def test_the_place_of_a_newcomer_is_known_before_it_comes() -> None:
    queue = FairQueue()
    for _ in range(30):
        queue.add(entry("hog"))
    assert queue.num_before(entry("hog")) == 30
    assert queue.num_before(entry("guest")) <= 1


def test_a_full_queue_takes_from_who_has_most() -> None:
    queue = FairQueue()
    hogs = [entry("hog") for _ in range(5)]
    for each in hogs:
        queue.add(each)
    queue.add(entry("small"))
    assert queue.last_of_hog(entry("small")) is hogs[-1]
    assert queue.last_of_hog(entry("hog")) is None
    assert queue.last_of_hog(entry("small", level=2)) is None
    assert queue.last_of_hog(entry("other", share=0.1)) is None, "by weight it has more than the hog"


def test_random_lives_keep_the_books() -> None:
    chance = random.Random(7)
    queue, alive = FairQueue(max_rows=8, ripe_rows=4), []
    for _ in range(600):
        if alive and chance.random() < 0.45:
            gone = alive.pop(chance.randrange(len(alive)))
            if chance.random() < 0.2 and not gone.is_delayed:
                queue.delay(gone)
                alive.append(gone)
            else:
                queue.remove(gone)
        else:
            name = chance.choice("abcd")
            alive.append(entry(name, share=ord(name) - 96, rows=chance.randint(1, 4), key=chance.choice([None, 1, 2])))
            queue.add(alive[-1])
        check_integrity(queue)
    assert set(queue) == set(alive)
