"""The result of measuring one candidate. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.bench.results import LevelResult
from modelserver.toolkit.tuning.space import Candidate, Score


@dataclass(frozen=True, slots=True)
class TunePoint:
    """One level of load. `latency_us` is what is judged: a percentile, or the mean."""

    concurrency: int
    throughput: float
    latency_us: float
    p50_us: float
    p99_us: float
    num_failures: int = 0
    is_stable: bool = True


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, its levels, and of these the one that counts. `error` says why no level was measured."""

    candidate: Candidate
    points: tuple[TunePoint, ...] = ()
    best: TunePoint | None = None
    score: Score | None = None
    error: str = ""


def point_of(level: LevelResult, percentile: float | None) -> TunePoint:
    """The point of a level of the bench."""
    latency = level.window.latency
    return TunePoint(
        concurrency=int(level.value),
        throughput=level.window.throughput,
        latency_us=latency.at(percentile),
        p50_us=latency.percentiles[50],
        p99_us=latency.percentiles[99],
        num_failures=level.num_failures,
        is_stable=level.is_stable,
    )


def judge(candidate: Candidate, points: Sequence[TunePoint], limit_us: float) -> Trial:
    """The trial of a candidate with these points; levels with failures do not count. `limit_us` 0: no limit."""
    good = [point for point in points if not point.num_failures and point.throughput > 0]
    if not good:
        num_failures = sum(point.num_failures for point in points)
        return Trial(
            candidate, tuple(points), error=f"{num_failures} requests failed" if num_failures else "no answers"
        )
    within = [point for point in good if not limit_us or point.latency_us <= limit_us]
    if within:
        best = max(within, key=lambda point: point.throughput)
        return Trial(candidate, tuple(points), best, Score(True, best.throughput))
    best = min(good, key=lambda point: point.latency_us)
    return Trial(candidate, tuple(points), best, Score(False, -best.latency_us))


def joined(first: Trial, second: Trial, limit_us: float) -> Trial:
    """Two measurements of a candidate as one: the better of each level. Disturbances make a machine slower only."""
    if first.score is None or second.score is None:
        return first if first.score is not None else second
    again = {point.concurrency: point for point in second.points}
    points = [_better(point, again.pop(point.concurrency, point)) for point in first.points]
    return judge(first.candidate, [*points, *again.values()], limit_us)


def _better(one: TunePoint, other: TunePoint) -> TunePoint:
    """The one without failures; of two such the one of more throughput."""
    return max(one, other, key=lambda point: (not point.num_failures, point.throughput))


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Best first; those without a score last."""
    scored = [trial for trial in trials if trial.score is not None]
    scored.sort(key=lambda trial: (trial.score is not None and trial.score.is_within, _value(trial)), reverse=True)
    return [*scored, *(trial for trial in trials if trial.score is None)]


def _value(trial: Trial) -> float:
    return trial.score.value if trial.score is not None else 0.0
