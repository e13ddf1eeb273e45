"""When requests of an open loop are due. Pure: seeds in, times out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, cycle

from modelserver.bench.work import OpenLoad, Share

NS_PER_S = 1_000_000_000


def due_times(load: OpenLoad, share: Share, seed: int) -> Iterator[int]:
    """The times, ns of the monotonic clock, at which one of several processes sends; they never end.

    Together the processes have the rate of the load. Poisson arrivals are split into independent ones of a lower
    rate, whose sum is Poisson again; the others are dealt out in turn.
    """
    if load.intervals_ns:
        times: Iterator[int] = accumulate(cycle(load.intervals_ns), initial=load.start_ns)
        return _every(times, share)
    if load.is_poisson:
        return _poisson(load, share, seed)
    gap_ns = NS_PER_S / load.rate
    return _constant(load.start_ns, gap_ns, share)


def _constant(start_ns: int, gap_ns: float, share: Share) -> Iterator[int]:
    number = share.index
    while True:
        yield start_ns + round(number * gap_ns)
        number += share.num_workers


def _poisson(load: OpenLoad, share: Share, seed: int) -> Iterator[int]:
    # A schedule, not a secret.
    source = random.Random(f"{seed}/{share.index}")  # noqa: S311
    rate_per_ns = load.rate / share.num_workers / NS_PER_S
    now_ns = float(load.start_ns)
    while True:
        now_ns += source.expovariate(rate_per_ns)
        yield round(now_ns)


def _every(times: Iterator[int], share: Share) -> Iterator[int]:
    for number, due_ns in enumerate(times):
        if number % share.num_workers == share.index:
            yield due_ns
