"""Differences of statistics, and the parts of a request."""

from __future__ import annotations

from modelserver.bench.server_statistics import ModelCounts, ServerCounts
from modelserver.telemetry.statistics_snapshot import DurationStat


def document(factor: int) -> dict[str, object]:
    parts = {"success": 100, "queue": 20, "compute_input": 10, "compute_infer": 50, "compute_output": 5}
    return {
        "name": "m",
        "version": "1",
        "inference_count": str(40 * factor),
        "execution_count": 10 * factor,
        "inference_stats": {
            name: {"count": str(10 * factor), "ns": us * 10_000 * factor} for name, us in parts.items()
        },
    }


def test_a_difference_is_what_happened_meanwhile() -> None:
    found = ModelCounts.from_document(document(3)) - ModelCounts.from_document(document(1))
    assert (found.inference_count, found.execution_count, found.success.count) == (80, 20, 20)
    assert [found.mean_us(name) for name in ("success", "queue", "compute_infer")] == [100, 20, 50]
    assert found.overhead_us == 15


def test_nothing_happened() -> None:
    counts = ModelCounts.from_document(document(1))
    assert (counts - counts).mean_us("queue") == 0
    assert ModelCounts.from_document({}).success == DurationStat()


def test_steps_of_an_ensemble_are_told_apart_by_name() -> None:
    before = ServerCounts(ModelCounts("e", "1", 1), (ModelCounts("a", "1", 5), ModelCounts("b", "1", 7)))
    after = ServerCounts(ModelCounts("e", "1", 4), (ModelCounts("a", "1", 8), ModelCounts("b", "1", 10)))
    assert [step.inference_count for step in (after - before).steps] == [3, 3]
