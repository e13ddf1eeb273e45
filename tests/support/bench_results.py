"""Results of a bench, made up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from modelserver.bench.fleet import Harvest
from modelserver.bench.interface import Interface
from modelserver.bench.options import BenchOptions
from modelserver.bench.results import LevelResult, Results
from modelserver.bench.server_statistics import ModelCounts, ServerCounts
from modelserver.bench.window import make_window
from modelserver.client.address import Address
from modelserver.telemetry.statistics_snapshot import DurationStat

US = 1000


def counts(number: int) -> ServerCounts:
    """So many requests of 40 us each: 10 in the queue, 1, 20 and 4 computing."""
    return ServerCounts(
        ModelCounts(
            "m",
            "1",
            inference_count=number,
            execution_count=number // 2,
            success=DurationStat(number, number * 40 * US),
            queue=DurationStat(number, number * 10 * US),
            compute_input=DurationStat(number, number * 1 * US),
            compute_infer=DurationStat(number, number * 20 * US),
            compute_output=DurationStat(number, number * 4 * US),
        )
    )


def level(value: float, *, num_requests: int = 100, latency_us: int = 100, **more: Any) -> LevelResult:
    """A second in which each request took as long; 3 us to send, 2 to receive."""
    end = np.linspace(0, 999_999_999, num_requests).astype(np.int64)
    start = end - latency_us * US
    times = np.stack((start, start, start + 3 * US, end - 2 * US, end), axis=1)
    harvest = Harvest(times=times, failures=more.get("failures", Counter()))
    percentile = more.pop("percentile", None)
    window = make_window(
        harvest,
        begin_ns=0,
        end_ns=1_000_000_000,
        batch_size=1,
        extra_percentile=percentile,
        before=counts(0),
        after=counts(num_requests),
    )
    fields = {"is_stable": True, "failures": Counter(), "harvest": harvest} | more
    return LevelResult(value=value, windows=[window] * 3, window=window, **fields)


def results(*levels: LevelResult, options: BenchOptions | None = None, **interface: Any) -> Results:
    given = options or BenchOptions("m", address=Address("localhost", 8000))
    return Results(given, Interface("m", "1", (), (), **interface), 1, list(levels))
