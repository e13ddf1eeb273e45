import pytest

from modelserver.scheduling.admission import DrainRate, expected_ns

MS = 1_000_000


def steady(each_ns: int, num_taken: int, num_batches: int) -> tuple[DrainRate, int]:
    rate, now_ns = DrainRate(), 10_000 * MS
    for _ in range(num_batches):
        rate.note(num_taken, 5, now_ns)
        now_ns += each_ns
    return rate, now_ns - each_ns


def test_nothing_is_said_before_enough_is_known() -> None:
    rate, now_ns = steady(10 * MS, 2, 3)
    assert rate.per_request_ns(now_ns) is None
    assert rate.retry_after_s(100, now_ns) == 1.0


@pytest.mark.parametrize(("each_ms", "num_taken", "expected_ms"), [(10, 2, 5), (1, 8, 0.125), (400, 1, 400)])
def test_it_is_the_time_between_requests_that_leave(each_ms: int, num_taken: int, expected_ms: float) -> None:
    rate, now_ns = steady(each_ms * MS, num_taken, 60)
    assert rate.per_request_ns(now_ns) == pytest.approx(expected_ms * MS)


def test_time_without_a_queue_does_not_count() -> None:
    rate, now_ns = steady(10 * MS, 1, 20)
    rate.note(1, 0, now_ns + 10 * MS)
    rate.note(1, 3, now_ns + 5000 * MS)
    assert rate.per_request_ns(now_ns + 5000 * MS) == pytest.approx(10 * MS)


def test_it_follows_a_model_that_gets_slower() -> None:
    rate, now_ns = steady(1 * MS, 1, 50)
    for _ in range(60):
        now_ns += 50 * MS
        rate.note(1, 5, now_ns)
    assert rate.per_request_ns(now_ns) == pytest.approx(50 * MS, rel=0.15)


def test_what_no_queue_confirms_is_forgotten() -> None:
    """Slow first requests, and then fast ones of which those are refused that would make a queue."""
    rate, now_ns = steady(1000 * MS, 1, 6)
    rate.note(1, 0, now_ns)
    for _ in range(4):
        now_ns += 400 * MS
        rate.note(1, 0, now_ns)
        assert rate.per_request_ns(now_ns) == pytest.approx(1000 * MS, rel=0.3)
    rate.note(1, 0, now_ns + 50 * MS)
    assert rate.per_request_ns(now_ns + 50 * MS) is None


def test_a_model_that_was_idle_is_as_fast_as_before() -> None:
    rate, now_ns = steady(10 * MS, 1, 20)
    rate.note(1, 0, now_ns + 10 * MS)
    assert rate.per_request_ns(now_ns + 60_000 * MS) == pytest.approx(10 * MS)


def test_a_queue_that_is_stuck_is_slow() -> None:
    rate, now_ns = steady(10 * MS, 1, 20)
    assert (rate.per_request_ns(now_ns + 2000 * MS) or 0) > 50 * MS


def test_coming_again_is_worth_while_when_the_queue_is_gone() -> None:
    rate, now_ns = steady(10 * MS, 1, 20)
    assert rate.retry_after_s(300, now_ns) == pytest.approx(3.0, abs=0.01)
    assert rate.retry_after_s(0, now_ns) == 0.001


def test_an_answer_takes_the_queue_one_and_a_half_executions_and_a_margin() -> None:
    assert expected_ns(10.0, 4, 2, is_answer=False) == 50.0
    assert expected_ns(10.0, 4, 2, is_answer=True) == pytest.approx(84.0)
