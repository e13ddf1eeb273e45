"""Plays loads in a load process, one after the other, on lanes that stay open between them."""

from __future__ import annotations

import abc
import asyncio
import random
import time
from collections.abc import Iterator
from itertools import accumulate, cycle
from typing import Protocol

from modelserver.bench.driver import ClosedDriver, Driver, OpenDriver, PeriodicDriver
from modelserver.bench.feed import Feed, make_feed
from modelserver.bench.recorder import Recorder, TensorRecorder
from modelserver.bench.work import ClosedLoad, Collected, Load, OpenLoad, PeriodicLoad, Share, Transport, Work
from modelserver.client.grpc_lane import GrpcLane, StreamLane
from modelserver.client.grpc_pool import GrpcPool
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Answers, Lane
from modelserver.errors import UnavailableError
from modelserver.wire.context import Arena
from modelserver.wire.http2.frame import MAX_31_BITS

# Connections that are opened at the same time: a server's backlog is finite.
MAX_OPENING = 64
# For streams to end.
FINISH_TIMEOUT_S = 1.0


class LanePool(Answers):
    """Opens lanes, keeps them from load to load, and passes their answers to the current load."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lanes: list[Lane] = []
        self._pools: list[GrpcPool] = []
        self._arena = Arena()
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._growing = asyncio.Lock()

    async def take(self, num_lanes: int, answers: Answers) -> list[Lane]:
        """The given number of free lanes, whose answers go to `answers`. Raises UnavailableError."""
        missing = num_lanes - len(self._lanes)
        if missing > 0:
            if self._work.transport is Transport.HTTP:
                await asyncio.gather(*(self._add_http() for _ in range(missing)))
            else:
                while len(self._lanes) < num_lanes:
                    await self._add_connection()
        taken = self._lanes[:num_lanes]
        for index, lane in enumerate(taken):
            lane.answers = answers
            lane.index = index
            lane.due_ns = 0
        return taken

    async def grow(self, index: int, answers: Answers) -> Lane:
        """One more lane than those taken; the `index`-th. Raises UnavailableError."""
        async with self._growing:
            while len(self._lanes) <= index:
                await (self._add_http() if self._work.transport is Transport.HTTP else self._add_connection())
        lane = self._lanes[index]
        lane.answers = answers
        lane.index = index
        return lane

    async def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        await asyncio.gather(*(pool.finish(FINISH_TIMEOUT_S) for pool in self._pools))
        self._lanes.clear()
        self._pools.clear()

    async def _add_http(self) -> None:
        lane = HttpLane(self._work.address, self, self._arena)
        async with self._opening:
            await lane.connect()
        self._lanes.append(lane)

    async def _add_connection(self) -> None:
        """A connection and the lanes that share it."""
        work = self._work
        pool = GrpcPool(
            work.address,
            fields=work.fields,
            frame_bytes=work.frame_bytes,
            window_bytes=MAX_31_BITS,
            max_connections=1,
            calls_per_connection=work.lanes_per_connection,
            arena=self._arena,
        )
        connection = await pool.prepare()
        self._pools.append(pool)
        num_lanes = min(work.lanes_per_connection, connection.max_calls)
        if num_lanes < 1:
            raise UnavailableError(f"{work.address} allows no streams")
        lane: Lane
        for _ in range(num_lanes):
            if work.transport is Transport.STREAM:
                lane = StreamLane(pool, self, is_decoupled=work.is_decoupled, algorithm=work.algorithm)
            else:
                lane = GrpcLane(pool, self)
            self._lanes.append(lane)

    # Lanes without a load have no answers.

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        """An answer after its load has ended."""

    def responded(self, lane: Lane) -> None:
        """A response after its load has ended."""


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


class Lanes(Protocol):
    """A source of lanes."""

    async def take(self, num_lanes: int, answers: Answers) -> list[Lane]: ...

    async def grow(self, index: int, answers: Answers) -> Lane: ...

    async def close(self) -> None: ...


class Player(abc.ABC):
    """The common part of all kinds of requests. A subclass defines the requests and their records."""

    def __init__(self, lanes: Lanes, share: Share, *, seed: int, may_grow: bool) -> None:
        self._lanes = lanes
        self._share = share
        self._seed = seed
        self._may_grow = may_grow
        self._driver: Driver | None = None
        self._waiting: asyncio.Task[None] | None = None

    @abc.abstractmethod
    def _prepare(self) -> tuple[Feed, Recorder]:
        """The requests of the next load, and empty records for it."""

    @abc.abstractmethod
    def collect(self) -> Collected:
        """The records since the last call."""

    async def begin(self, load: Load) -> None:
        """Start a load. Raises UnavailableError when the server cannot be reached."""
        feed, recorder = self._prepare()
        share = self._share
        if isinstance(load, ClosedLoad):
            num_requests = None if load.num_requests is None else share.of(load.num_requests)
            closed = ClosedDriver(feed, recorder, num_requests=num_requests)
            closed.begin(await self._lanes.take(share.of(load.concurrency), closed))
            self._driver = closed
        elif isinstance(load, PeriodicLoad):
            periodic = PeriodicDriver(feed, recorder, load)
            periodic.begin(await self._lanes.take(load.total, periodic))
            self._driver = periodic
        else:
            self._driver = await self._begin_open(load, feed, recorder)
        self._waiting = asyncio.get_running_loop().create_task(self._driver.wait())

    async def _begin_open(self, load: OpenLoad, feed: Feed, recorder: Recorder) -> Driver:
        share = self._share
        num_taken = max(1, share.of(load.num_lanes))
        max_lanes = max(1, share.of(load.max_lanes))

        def grow() -> asyncio.Task[Lane]:
            nonlocal num_taken
            if num_taken >= max_lanes:
                raise UnavailableError(f"{max_lanes} connections are all there may be")
            num_taken += 1
            return asyncio.get_running_loop().create_task(self._lanes.grow(num_taken - 1, driver))

        driver = OpenDriver(
            feed,
            recorder,
            due_times=due_times(load, share, self._seed),
            num_requests=None if load.num_requests is None else share.of(load.num_requests),
            grow=grow if self._may_grow else None,
        )
        driver.begin(await self._lanes.take(num_taken, driver))
        return driver

    async def end(self, timeout_s: float) -> int:
        """Stop the load; returns how many of its requests were never answered."""
        driver, self._driver = self._driver, None
        if driver is None:
            return 0
        num_unanswered = await driver.stop(timeout_s)
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if num_unanswered:
            # Their lanes are busy with abandoned requests.
            await self._lanes.close()
        return num_unanswered

    async def close(self) -> None:
        await self._lanes.close()

    @property
    def _is_over(self) -> bool:
        return self._waiting is not None and self._waiting.done()


class TensorPlayer(Player):
    """Inference requests."""

    def __init__(self, work: Work, share: Share) -> None:
        # A sequence belongs to its lane: their number is the user's choice.
        super().__init__(LanePool(work), share, seed=work.seed, may_grow=work.sequences is None)
        self._work = work
        self._recorder: TensorRecorder | None = None

    def _prepare(self) -> tuple[Feed, Recorder]:
        feed = make_feed(self._work, self._share)
        self._recorder = TensorRecorder(self._work, feed)
        return feed, self._recorder

    def collect(self) -> Collected:
        if self._recorder is None:
            return Collected(cpu_s=time.process_time(), is_over=True)
        taken = self._recorder.records.take()
        return Collected(
            times=taken.times.tobytes(),
            num_responses=taken.num_responses.tobytes(),
            response_times=taken.response_times.tobytes(),
            failure_times=taken.failure_times.tobytes(),
            failures=dict(taken.failures),
            cpu_s=time.process_time(),
            is_over=self._is_over,
        )
