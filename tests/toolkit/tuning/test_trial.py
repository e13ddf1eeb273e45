"""Which level of a trial counts, and who is first."""

from modelserver.toolkit.tuning.space import Candidate, Score
from modelserver.toolkit.tuning.trial import Trial, TunePoint, joined, judge, ranked


def point(concurrency: int, throughput: float, latency_us: float, num_failures: int = 0) -> TunePoint:
    return TunePoint(concurrency, throughput, latency_us, latency_us / 2, latency_us, num_failures)


POINTS = (point(1, 100, 1000), point(4, 300, 3000), point(16, 400, 9000))


def test_the_most_within_the_limit_counts() -> None:
    assert judge(Candidate(), POINTS, 0).best is POINTS[2]
    assert judge(Candidate(), POINTS, 5000).score == Score(True, 300)
    late = judge(Candidate(), POINTS, 500)
    assert (late.best, late.score) == (POINTS[0], Score(False, -1000))


def test_levels_with_failures_do_not_count() -> None:
    assert judge(Candidate(), (POINTS[0], point(4, 900, 10, 3)), 0).best is POINTS[0]
    assert judge(Candidate(), (point(4, 900, 10, 3),), 0).error == "3 requests failed"
    assert judge(Candidate(), (), 0).error == "no answers"


def test_two_measurements_are_joined() -> None:
    first, second = judge(Candidate(), POINTS, 0), judge(Candidate(), (point(1, 50, 2000), point(16, 200, 11000)), 0)
    both = joined(first, second, 0)
    assert [(one.concurrency, one.throughput) for one in both.points] == [(1, 100), (4, 300), (16, 400)]
    assert both.score == Score(True, 400)
    assert joined(second, first, 0).score == both.score
    assert joined(first, Trial(Candidate(), error="gone"), 0) is first


def test_the_best_is_first_and_what_failed_is_last() -> None:
    trials = [
        Trial(Candidate(1), error="no"),
        judge(Candidate(2), POINTS, 500),
        judge(Candidate(3), POINTS[:1], 0),
        judge(Candidate(4), POINTS, 0),
    ]
    assert [trial.candidate.num_instances for trial in ranked(trials)] == [4, 3, 2, 1]
