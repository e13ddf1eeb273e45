from __future__ import annotations

import pytest

from modelserver.wire.assembly import AssemblyBudget


def test_a_budget_is_taken_and_given_back() -> None:
    budget = AssemblyBudget(10)
    assert budget.charge(6)
    assert not budget.charge(5)
    assert budget.charge(4)
    budget.release(6)
    assert budget.charge(5)
    assert budget.num_bytes == 9


def test_nobody_gives_back_more_than_was_taken() -> None:
    with pytest.raises(AssertionError, match="more is released"):
        AssemblyBudget(10).release(1)
