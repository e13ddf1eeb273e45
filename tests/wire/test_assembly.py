from __future__ import annotations

import pytest

from modelserver.wire.assembly import AssemblyBudget


def test_a_budget_is_taken_and_given_back() -> None:
    budget = AssemblyBudget(10)
    large, first, second = object(), object(), object()
    assert budget.charge(6, first)
    assert budget.charge(5, large)
    assert not budget.charge(4, second)
    budget.release(6, first)
    assert budget.charge(5, second)
    assert budget.num_bytes == 10


def test_one_at_a_time_may_be_as_large_as_it_is() -> None:
    budget = AssemblyBudget(10)
    large, small = object(), object()
    assert budget.charge(10, large)
    assert budget.charge(1, large)
    assert budget.charge(100, large)
    assert not budget.charge(1, small)
    budget.release(111, large)
    assert budget.charge(11, small)


def test_nobody_gives_back_more_than_was_taken() -> None:
    budget = AssemblyBudget(10)
    with pytest.raises(AssertionError, match="more is released"):
        budget.release(1, budget)
