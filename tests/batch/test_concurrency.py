"""How many requests a batch has in flight, under traces of simulated servers."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from modelserver.batch.concurrency import Concurrency


def play(concurrency: Concurrency, num_answers: int, latency_s: Callable[[int], float], most: int = 10_000) -> float:
    """Answer requests of a server with that latency at that load, which refuses more than `most`; the last rate."""
    now_s, ends, answered = 0.0, [], []
    while len(answered) < num_answers:
        while len(ends) < concurrency.limit:
            if len(ends) >= most:
                concurrency.refused(now_s)
                break
            heapq.heappush(ends, now_s + latency_s(len(ends) + 1))
        now_s = heapq.heappop(ends)
        answered.append(now_s)
        concurrency.answered(now_s)
    tail = answered[-num_answers // 4 :]
    return (len(tail) - 1) / (tail[-1] - tail[0])


def test_it_grows_as_long_as_the_rate_does() -> None:
    """A server that answers up to 48 requests in the time of one."""
    concurrency = Concurrency()
    rate = play(concurrency, 20_000, lambda load: 0.05 * max(1.0, load / 48))
    assert rate >= 0.97 * 48 / 0.05
    assert 48 <= concurrency.limit <= 160


def test_a_server_of_one_request_at_a_time_gets_few() -> None:
    concurrency = Concurrency()
    play(concurrency, 5_000, lambda load: 0.002 * load)
    assert concurrency.limit <= 20


def test_refusals_halve_it_and_it_stays_below_them() -> None:
    concurrency = Concurrency()
    rate = play(concurrency, 20_000, lambda load: 0.02 * max(1.0, load / 1000), most=40)
    assert concurrency.limit <= 41
    assert rate >= 0.4 * 40 / 0.02


def test_a_fixed_number_stays() -> None:
    concurrency = Concurrency(7, is_fixed=True)
    play(concurrency, 1_000, lambda _: 0.01)
    concurrency.refused(1e9)
    assert concurrency.limit == 7
