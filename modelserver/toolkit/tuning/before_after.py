"""The model as it was beside its best setting, as rows of tables and as JSON: size, throughput, latency, answers."""

from __future__ import annotations

from collections.abc import Iterator

from modelserver.toolkit.comparison_report import Row, accuracy_rows, bytes_text, ms_text, parity_document, ratio_row
from modelserver.toolkit.tuning.session import TuneResult
from modelserver.toolkit.tuning.trial import TunePoint


def before_after_rows(result: TuneResult) -> list[Row]:
    """Rows of (what, before, after, change); none where nothing could be measured."""
    base, best = result.baseline, result.winner
    if base is None or best is None or base.best is None or best.best is None:
        return []
    rows: list[Row] = []
    if result.num_bytes is not None:
        # The files are those of before: what changes is how they are executed.
        rows.append(ratio_row("size", result.num_bytes, result.num_bytes, bytes_text))
    rows.append(ratio_row("inferences/s", base.best.throughput, best.best.throughput, "{:,.0f}".format))
    for before, after in _levels(result):
        name = f"{latency_name(result)}, {before.concurrency} in flight"
        rows.append(ratio_row(name, before.latency_us / 1e3, after.latency_us / 1e3, ms_text))
    if result.parity is not None:
        rows += accuracy_rows(result.parity)
    return rows


def latency_name(result: TuneResult) -> str:
    """Which latency is judged, in words."""
    percentile = result.options.percentile
    return "mean latency" if percentile is None else f"p{percentile:g} latency"


def _levels(result: TuneResult) -> Iterator[tuple[TunePoint, TunePoint]]:
    """The points of the levels of load that were measured both before and after."""
    if result.baseline is None or result.winner is None:
        return
    after = {point.concurrency: point for point in result.winner.points}
    for point in result.baseline.points:
        if point.concurrency in after and not point.num_failures and not after[point.concurrency].num_failures:
            yield point, after[point.concurrency]


def before_after_document(result: TuneResult) -> dict[str, object]:
    """The same as JSON; without answers the reason why they were not compared."""
    size = result.num_bytes
    return {
        "size_bytes": None if size is None else {"before": size, "after": size},
        "latency_ms": [
            {"concurrency": before.concurrency, "before": before.latency_us / 1e3, "after": after.latency_us / 1e3}
            for before, after in _levels(result)
        ],
        **({"not_compared": result.not_compared} if result.parity is None else parity_document(result.parity)),
    }
