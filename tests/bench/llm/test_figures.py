"""What recorded times mean for a language model."""

from __future__ import annotations

import pytest

from modelserver.bench.llm.options import Target
from modelserver.bench.llm.results import Call, call_figures, level_figures, pack_calls, spread, unpack_calls

MS = 1_000_000


def call(*chunks_ms: int, due_ms: int = 0, output_tokens: int | None = None, input_tokens: int | None = None) -> Call:
    times = [at * MS for at in chunks_ms]
    return Call(due_ms * MS, due_ms * MS, times[-1] + MS, 0, times, input_tokens, output_tokens)


def test_a_call_by_hand() -> None:
    """Sent at 10, tokens at 110, 130, 170: first after 100, then 20 and 40, so 30 per token."""
    found = call_figures(call(110, 130, 170, due_ms=10))
    assert (found.ttft_ms, found.second_ms, found.latency_ms) == (100, 20, 160)
    assert found.per_token_ms == 30
    assert found.output_tokens == 3


def test_usage_counts_tokens_that_come_several_in_an_event() -> None:
    found = call_figures(call(100, 140, output_tokens=9, input_tokens=5))
    assert found.output_tokens == 9
    assert found.per_token_ms == 5
    assert found.input_tokens == 5


@pytest.mark.parametrize("one", [call(100), call(100, output_tokens=1), call(100, output_tokens=8)])
def test_one_event_tells_no_time_between_tokens(one: Call) -> None:
    assert call_figures(one).per_token_ms is None


def test_a_level() -> None:
    calls = [call(100, 110, 120, input_tokens=7), call(300, 340, 380, due_ms=100, input_tokens=9)]
    found = level_figures(calls, targets={})
    assert found.seconds == pytest.approx(0.381)
    assert found.ttft.mean == 150
    assert found.gaps.mean == 25
    assert found.gaps.count == 4
    assert found.per_token.mean == 25
    assert found.per_user.mean == pytest.approx((100 + 25) / 2)
    assert found.output_rate == pytest.approx(6 / 0.381)
    assert found.total_rate == pytest.approx(22 / 0.381)
    assert (found.goodput, found.good_share, found.has_usage) == (None, None, False)


@pytest.mark.parametrize(
    ("targets", "share"),
    [
        ({Target.TTFT: 100}, 0.5),
        ({Target.TTFT: 99}, 0.0),
        ({Target.ITL: 40}, 1.0),
        ({Target.ITL: 20}, 0.5),
        ({Target.LATENCY: 279}, 0.5),
        ({Target.TTFT: 500, Target.ITL: 15}, 0.5),
    ],
)
def test_goodput_is_what_meets_all_targets(targets: dict[Target, float], share: float) -> None:
    calls = [call(100, 110, 120), call(300, 340, 380, due_ms=100)]
    found = level_figures(calls, targets=targets)
    assert found.good_share == share
    assert found.goodput == pytest.approx(2 * share / found.seconds)


def test_nothing_answered() -> None:
    found = level_figures([], targets={Target.TTFT: 1})
    assert (found.num_requests, found.output_rate, found.goodput, found.good_share) == (0, 0.0, 0.0, None)


def test_spreads() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0])
    assert (found.mean, found.min, found.max, found.percentiles[50], found.percentiles[99]) == (2.5, 1, 4, 2, 4)


def test_calls_travel_between_processes() -> None:
    calls = [call(1, 2), call(3, output_tokens=4, input_tokens=5)]
    assert unpack_calls(pack_calls(calls)) == calls
