"""Measures one level of load after the other: windows until they agree, or a fixed number of requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from time import monotonic_ns
from typing import Protocol

from modelserver.bench.fleet import Fleet, Harvest
from modelserver.bench.options import BenchOptions, LoadOptions, Mode
from modelserver.bench.results import LevelResult
from modelserver.bench.search import BinarySearch, LinearSearch, ListSearch, LoadRange, Search
from modelserver.bench.server_statistics import Sample, ServerCounts, combine
from modelserver.bench.window import NUM_STABLE, Window, make_window, merge
from modelserver.bench.work import ClosedLoad, OpenLoad, PeriodicLoad
from modelserver.errors import ServerError, UnavailableError

# Windows that count requests last at least this long.
MIN_WINDOW_S = 1.0
POLL_S = 0.05
# A run of a fixed number of requests in which nothing is answered any more for this long is over.
STALLED_S = 60.0
# Time for a load to reach its state before the first window.
RAMP_UP_S = 0.1
# The first requests of an open loop are due a little later than now: all processes must have begun.
OPEN_START_NS = 50_000_000


class Watcher(Protocol):
    """Receives the progress of a run: the text report and the progress bar."""

    def level_began(self, value: float) -> None: ...

    def window_began(self, trial: int, seconds: float) -> None: ...

    def window_ended(self, trial: int, window: Window) -> None: ...

    def level_ended(self, level: LevelResult) -> None: ...


def search_levels(load: LoadOptions) -> Search:
    """The levels that the options ask for."""
    if load.values:
        return ListSearch(load.values)
    if load.mode is Mode.INTERVALS:
        mean_ns = sum(load.intervals_ns) / len(load.intervals_ns)
        return LinearSearch(LoadRange(round(1e9 / mean_ns, 3)))
    if load.is_binary:
        return BinarySearch(load.levels, is_whole=load.mode is Mode.CONCURRENCY)
    return LinearSearch(load.levels)


class Profiler:
    """Runs loads on a prepared fleet."""

    def __init__(
        self,
        options: BenchOptions,
        fleet: Fleet,
        *,
        read_counts: Callable[[], Awaitable[ServerCounts | None]],
        take_samples: Callable[[], list[Sample]],
        watcher: Watcher,
        has_sequences: bool,
    ) -> None:
        self._options = options
        self._load = options.load
        self._measurement = options.measurement
        self._stability = options.measurement.stability
        self._fleet = fleet
        self._read_counts = read_counts
        self._take_samples = take_samples
        self._watcher = watcher
        self._has_sequences = has_sequences
        self._batch_size = options.request.data.batch_size

    async def run(self) -> list[LevelResult]:
        """All levels. Raises ServerError when the load cannot be made at all."""
        if self._measurement.num_warmup_requests:
            await self._warm_up()
        if self._load.mode is Mode.PERIODIC:
            return [await self._measure_periodic()]
        results = []
        search = search_levels(self._load)
        for value in search:
            level = await self._measure(value)
            results.append(level)
            search.report(not self._stability.is_over_limit(level.window) and bool(level.window.num_requests))
        return results

    async def _warm_up(self) -> None:
        # At most as many at once as the first level has.
        most = int(self._load.levels.start) if self._load.mode is Mode.CONCURRENCY else self._fleet.num_workers
        count = self._measurement.num_warmup_requests
        await self._fleet.begin(ClosedLoad(concurrency=min(most, count), num_requests=count))
        harvest = await self._until_over()
        await self._fleet.end()
        if not len(harvest.times):
            raise UnavailableError(f"no request of the warm-up succeeded: {_first(harvest.failures)}")

    async def _until_over(self) -> Harvest:
        """Collect until a load of a fixed number of requests is at its end."""
        whole = Harvest()
        last_progress_ns = monotonic_ns()
        while True:
            harvest = await self._fleet.collect()
            whole.add(harvest)
            if harvest.is_over:
                return whole
            if len(harvest.times) or len(harvest.failure_times):
                last_progress_ns = monotonic_ns()
            elif monotonic_ns() - last_progress_ns > STALLED_S * 1e9:
                return whole
            await asyncio.sleep(POLL_S)

    async def _measure(self, value: float) -> LevelResult:
        self._watcher.level_began(value)
        self._take_samples()
        if self._measurement.num_requests:
            level = await self._measure_count(value)
        else:
            level = await self._measure_windows(value)
        level.gpu = combine(self._take_samples())
        self._watcher.level_ended(level)
        return level

    async def _begin(self, value: float, num_requests: int | None = None) -> None:
        if self._load.mode is Mode.CONCURRENCY:
            await self._fleet.begin(ClosedLoad(concurrency=int(value), num_requests=num_requests))
            return
        await self._fleet.begin(
            OpenLoad(
                rate=value,
                start_ns=monotonic_ns() + OPEN_START_NS,
                is_poisson=self._load.is_poisson,
                intervals_ns=self._load.intervals_ns,
                num_lanes=self._num_open_lanes(),
                max_lanes=self._load.max_lanes,
                num_requests=num_requests,
            )
        )

    def _num_open_lanes(self) -> int:
        if self._has_sequences:
            return max(self._load.num_sequences, self._fleet.num_workers)
        return 16 * self._fleet.num_workers

    async def _measure_windows(self, value: float) -> LevelResult:
        await self._begin(value)
        failures: Counter[str] = Counter()
        windows: list[Window] = []
        harvests: list[Harvest] = []
        kept = Harvest()
        is_stable = False
        try:
            await asyncio.sleep(RAMP_UP_S)
            failures += (await self._fleet.collect()).failures
            for trial in range(1, self._measurement.max_trials + 1):
                harvest, window = await self._measure_window(trial)
                failures += harvest.failures
                if self._options.report.export_file is not None:
                    kept.add(harvest)
                windows.append(window)
                harvests = [*harvests, harvest][-NUM_STABLE:]
                self._watcher.window_ended(trial, window)
                is_stable = self._stability.is_stable(windows)
                if is_stable or self._stability.is_hopeless(windows) or _only_fails(windows):
                    break
        finally:
            num_unanswered = await self._end(failures)
        last = windows[-len(harvests) :]
        return LevelResult(
            value=value,
            windows=windows,
            window=merge(harvests, last, self._stability.percentile),
            is_stable=is_stable,
            failures=failures,
            num_unanswered=num_unanswered,
            harvest=kept if self._options.report.export_file is not None else None,
        )

    async def _end(self, failures: Counter[str]) -> int:
        try:
            num_unanswered = await self._fleet.end()
            failures += (await self._fleet.collect()).failures
        except ServerError:
            # The reason for the end is already reported.
            return 0
        return num_unanswered

    async def _measure_window(self, trial: int) -> tuple[Harvest, Window]:
        before = await self._read_counts()
        # Answers in between belong to no window, but failures are reported anyway.
        harvest = await self._fleet.collect()
        begin_ns = monotonic_ns()
        if self._measurement.counts_requests:
            await self._wait_for_count(harvest, trial)
        else:
            self._watcher.window_began(trial, self._measurement.interval_s)
            await asyncio.sleep(self._measurement.interval_s)
        end_ns = monotonic_ns()
        after = await self._read_counts()
        harvest.add(await self._fleet.collect())
        window = make_window(
            harvest,
            begin_ns=begin_ns,
            end_ns=end_ns,
            batch_size=self._batch_size,
            extra_percentile=self._stability.percentile,
            before=before,
            after=after,
        )
        return harvest, window

    async def _wait_for_count(self, harvest: Harvest, trial: int) -> None:
        """At least a second, and until enough requests are answered or answers seem to have stopped."""
        self._watcher.window_began(trial, MIN_WINDOW_S)
        waited_s, num_before = 0.0, len(harvest.times)
        while waited_s < STALLED_S:
            await asyncio.sleep(MIN_WINDOW_S)
            waited_s += MIN_WINDOW_S
            harvest.add(await self._fleet.collect())
            if len(harvest.times) - num_before >= self._measurement.window_requests:
                return

    async def _measure_count(self, value: float) -> LevelResult:
        """A fixed number of requests: one window from the first to the last answer."""
        before = await self._read_counts()
        begin_ns = monotonic_ns()
        self._watcher.window_began(1, 0.0)
        await self._begin(value, self._measurement.num_requests)
        failures: Counter[str] = Counter()
        try:
            harvest = await self._until_over()
        finally:
            num_unanswered = await self._end(failures)
        return await self._whole(value, harvest, begin_ns, before, failures, num_unanswered)

    async def _measure_periodic(self) -> LevelResult:
        levels = self._load.levels
        before = await self._read_counts()
        begin_ns = monotonic_ns()
        self._watcher.level_began(levels.start)
        self._watcher.window_began(1, 0.0)
        total = int(levels.end or levels.start)
        await self._fleet.begin(
            PeriodicLoad(first=int(levels.start), total=total, step=int(levels.step), period=self._load.request_period)
        )
        failures: Counter[str] = Counter()
        try:
            harvest = await self._until_over()
        finally:
            num_unanswered = await self._end(failures)
        level = await self._whole(total, harvest, begin_ns, before, failures, num_unanswered)
        self._watcher.level_ended(level)
        return level

    async def _whole(
        self,
        value: float,
        harvest: Harvest,
        begin_ns: int,
        before: ServerCounts | None,
        failures: Counter[str],
        num_unanswered: int,
    ) -> LevelResult:
        """The result of a load that ran to its end: one window of everything."""
        after = await self._read_counts()
        ends = harvest.times[:, -1]
        window = make_window(
            harvest,
            begin_ns=begin_ns,
            end_ns=int(ends.max()) + 1 if len(ends) else monotonic_ns(),
            batch_size=self._batch_size,
            extra_percentile=self._stability.percentile,
            before=before,
            after=after,
        )
        return LevelResult(
            value=value,
            windows=[window],
            window=window,
            is_stable=True,
            failures=failures + harvest.failures,
            num_unanswered=num_unanswered,
            harvest=harvest if self._options.report.export_file is not None else None,
        )


def _only_fails(windows: list[Window]) -> bool:
    """Whether there were only failures: measuring on would give no new information."""
    return bool(windows[-1].num_failed) and not windows[-1].num_requests


def _first(failures: Counter[str]) -> str:
    return next(iter(failures), "nothing was answered")
