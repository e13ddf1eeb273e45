"""A run of prompts from its options to its results."""

from __future__ import annotations

import asyncio
from time import monotonic_ns

from modelserver.bench.fleet import Fleet, Harvest
from modelserver.bench.llm.options import DEFAULT_PATHS, LlmOptions
from modelserver.bench.llm.prompts import encode_prompts, make_prompts
from modelserver.bench.llm.results import Call, LlmLevel, LlmResults, level_figures, unpack_calls
from modelserver.bench.options import Mode
from modelserver.bench.profiler import OPEN_START_NS, search_levels
from modelserver.bench.session import count_workers
from modelserver.bench.window import Nanoseconds
from modelserver.bench.work import ClosedLoad, LlmWork, OpenLoad
from modelserver.client.heads import model_path
from modelserver.errors import UnavailableError

POLL_S = 0.1
# Without an event of any request for this long, the server has stopped answering.
STALLED_S = 120.0
REQUESTS_PER_LANE = 4
MIN_REQUESTS = 20


class LlmWatcher:
    """Receives the progress of a run."""

    def level_began(self, value: float) -> None:
        """A level of the load begins."""

    def progressed(self, num_done: int, num_requests: int) -> None:
        """So far, in the present level."""

    def level_ended(self, level: LlmLevel) -> None:
        """A level is measured."""


async def run_llm(options: LlmOptions, watcher: LlmWatcher) -> LlmResults:
    """Measure. Raises ServerError for what keeps the run from starting."""
    path = (
        options.path or DEFAULT_PATHS.get(options.endpoint_type) or model_path(options.model, "") + "/generate_stream"
    )
    requests = encode_prompts(options, make_prompts(options.prompts), path)
    work = LlmWork(options.endpoint_type, options.address, requests, options.load.seed)
    num_workers = count_workers(options.load)
    results = LlmResults(options, num_workers)
    async with Fleet(num_workers) as fleet:
        await fleet.set_up(work)
        if options.num_warmup_requests:
            await _warm_up(options, fleet)
        search = search_levels(options.load)
        for value in search:
            watcher.level_began(value)
            level = await _measure(options, fleet, value, watcher)
            results.levels.append(level)
            watcher.level_ended(level)
            search.report(bool(level.figures.num_requests))
    return results


async def _warm_up(options: LlmOptions, fleet: Fleet) -> None:
    count = options.num_warmup_requests
    await fleet.begin(ClosedLoad(concurrency=min(count, int(options.load.levels.start) or 1), num_requests=count))
    harvest, calls = await _until_over(fleet, count, None)
    await fleet.end()
    if not calls:
        raise UnavailableError(f"no request of the warm-up succeeded: {next(iter(harvest.failures), 'no answer')}")


def count_requests(options: LlmOptions, value: float) -> int:
    """How many requests a level has."""
    if options.num_requests:
        return options.num_requests
    lanes = int(value) if options.load.mode is Mode.CONCURRENCY else 1
    return max(MIN_REQUESTS, REQUESTS_PER_LANE * lanes)


async def _measure(options: LlmOptions, fleet: Fleet, value: float, watcher: LlmWatcher) -> LlmLevel:
    count = count_requests(options, value)
    # Records from before belong to no level.
    await fleet.collect()
    if options.load.mode is Mode.CONCURRENCY:
        await fleet.begin(ClosedLoad(concurrency=min(int(value), count), num_requests=count))
    else:
        await fleet.begin(
            OpenLoad(
                rate=value,
                start_ns=monotonic_ns() + OPEN_START_NS,
                is_poisson=options.load.is_poisson,
                intervals_ns=options.load.intervals_ns,
                num_lanes=8 * fleet.num_workers,
                max_lanes=options.load.max_lanes,
                num_requests=count,
            )
        )
    harvest, calls = await _until_over(fleet, count, watcher)
    num_unanswered = await fleet.end()
    last = await fleet.collect()
    calls += [call for packed in last.calls for call in unpack_calls(packed)]
    return LlmLevel(
        value=value,
        figures=level_figures(calls, targets=options.goodput),
        failures=harvest.failures + last.failures,
        num_unanswered=num_unanswered,
        busiest=harvest.busiest,
        calls=calls,
    )


async def _until_over(fleet: Fleet, count: int, watcher: LlmWatcher | None) -> tuple[Harvest, list[Call]]:
    """Collect until all requests are answered, or events stop."""
    whole = Harvest()
    calls: list[Call] = []
    progress_ns = monotonic_ns()
    while True:
        harvest = await fleet.collect()
        whole.add(harvest)
        new = [call for packed in harvest.calls for call in unpack_calls(packed)]
        calls += new
        if watcher is not None:
            watcher.progressed(len(calls) + len(whole.failure_times), count)
        if harvest.is_over:
            return whole, calls
        if new or _any(harvest.failure_times):
            progress_ns = monotonic_ns()
        elif monotonic_ns() - progress_ns > STALLED_S * 1e9:
            return whole, calls
        await asyncio.sleep(POLL_S)


def _any(times: Nanoseconds) -> bool:
    return len(times) > 0
