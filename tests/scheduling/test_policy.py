from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batching import batching_config

from modelserver.config.schema import ModelDynamicBatching
from modelserver.scheduling.policy import BatchingRules, BatchPlan, Candidates, plan_batch

US = 1000


def rules(max_rows: int = 8, preferred: tuple[int, ...] = (8,), delay_us: int = 0, **fields: bool) -> BatchingRules:
    return BatchingRules(max_rows, preferred, delay_us * US, **fields)


@pytest.mark.parametrize(
    ("given_rules", "rows", "age_us", "expected"),
    [
        (rules(), [1, 1, 1], 0, BatchPlan(3, 3)),
        (rules(), [6, 4, 2], 0, BatchPlan(3, 8, (1,))),
        (rules(), [6, 4, 4], 0, BatchPlan(1, 6)),
        (rules(keep_order=True), [6, 4, 2], 0, BatchPlan(1, 6)),
        (rules(delay_us=100), [1], 0, BatchPlan(wait_until_ns=1100 * US)),
        (rules(delay_us=100), [1], 99, BatchPlan(wait_until_ns=1100 * US)),
        (rules(delay_us=100), [1], 100, BatchPlan(1, 1)),
        (rules(delay_us=100), [4, 4], 0, BatchPlan(2, 8)),
        (rules(delay_us=100), [6, 4], 0, BatchPlan(1, 6)),
        (rules(preferred=(2, 6), delay_us=100), [2], 0, BatchPlan(1, 2)),
        (rules(preferred=(2, 6), delay_us=100), [4, 1], 0, BatchPlan(wait_until_ns=1100 * US)),
        (rules(preferred=(2, 6), delay_us=100), [3, 4], 0, BatchPlan(1, 3)),
        (rules(preferred=(2, 6), delay_us=100), [7], 0, BatchPlan(1, 7)),
        (rules(preferred=(2, 6), delay_us=100), [1, 1, 1], 0, BatchPlan(2, 2)),
        (rules(preferred=(2, 6), delay_us=100), [1, 1, 1], 100, BatchPlan(3, 3)),
        (rules(preferred=(4, 8)), [1] * 6, 0, BatchPlan(4, 4)),
        (rules(preferred=(4, 8)), [1, 1], 0, BatchPlan(2, 2)),
        (rules(preferred=(4,)), [3, 8, 1, 1], 0, BatchPlan(3, 4, (1,))),
    ],
)
def test_plan(given_rules: BatchingRules, rows: list[int], age_us: int, expected: BatchPlan) -> None:
    assert plan_batch(given_rules, Candidates(rows, 1000 * US), (1000 + age_us) * US) == expected


def test_closed_candidates_do_not_wait() -> None:
    assert plan_batch(rules(delay_us=100, keep_order=True), Candidates([1], 0, is_closed=True), 0) == BatchPlan(1, 1)


@given(
    rows=st.lists(st.integers(1, 8), min_size=1, max_size=20),
    preferred=st.sets(st.integers(1, 8)),
    delay_us=st.integers(0, 3),
    now_us=st.integers(0, 4),
    keep_order=st.booleans(),
)
def test_any_plan_is_sound(rows: list[int], preferred: set[int], delay_us: int, now_us: int, keep_order: bool) -> None:
    given_rules = rules(8, tuple(sorted(preferred)) or (8,), delay_us, keep_order=keep_order)
    plan = plan_batch(given_rules, Candidates(rows, 0), now_us * US)
    if plan.wait_until_ns is not None:
        assert plan == BatchPlan(wait_until_ns=delay_us * US)
        assert now_us < delay_us
        return
    taken = [count for position, count in enumerate(rows[: plan.num_considered]) if position not in plan.skipped]
    assert 0 < sum(taken) == plan.num_rows <= 8
    assert 0 not in plan.skipped, "the head is always taken"
    assert not (keep_order and plan.skipped)


@pytest.mark.parametrize(
    ("batching", "max_batch_size", "expected"),
    [
        (None, 4, BatchingRules(4, (4,), is_single=True)),
        (ModelDynamicBatching(), 0, BatchingRules(1, (1,), is_single=True)),
        (ModelDynamicBatching(), 4, BatchingRules(4, (4,))),
        (
            ModelDynamicBatching((4, 2), max_queue_delay_microseconds=5, preserve_ordering=True),
            8,
            BatchingRules(8, (2, 4), 5 * US, keep_order=True),
        ),
    ],
)
def test_rules_of_a_config(batching: ModelDynamicBatching, max_batch_size: int, expected: BatchingRules) -> None:
    assert BatchingRules.from_config(batching_config(max_batch_size, dynamic_batching=batching)) == expected
