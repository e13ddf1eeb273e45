from __future__ import annotations

import pytest

from modelserver.scheduling.sequence_policy import DirectPlan, DirectRules, SlotHead, plan_direct

EAGER = DirectRules()
PATIENT = DirectRules(0.5, 1000)


@pytest.mark.parametrize(
    ("rules", "heads", "now_ns", "expected"),
    [
        (EAGER, [SlotHead(5), None, SlotHead(3), None], 5, DirectPlan((0, 2))),
        # Only what the oldest may share a batch with goes.
        (EAGER, [SlotHead(5, "x"), SlotHead(4, "y"), SlotHead(6, "y")], 6, DirectPlan((1, 2))),
        (PATIENT, [SlotHead(5), None, None, None], 6, DirectPlan(wait_until_ns=1005)),
        (PATIENT, [SlotHead(5), None, SlotHead(9), None], 9, DirectPlan((0, 2))),
        (PATIENT, [SlotHead(5), None, None, None], 1005, DirectPlan((0,))),
        # One of the two without the other has no effect.
        (DirectRules(1.0, 0), [SlotHead(5), None], 5, DirectPlan((0,))),
        (DirectRules(0.0, 1000), [SlotHead(5), None], 5, DirectPlan((0,))),
    ],
)
def test_plan(rules: DirectRules, heads: list[SlotHead | None], now_ns: int, expected: DirectPlan) -> None:
    assert plan_direct(rules, heads, now_ns) == expected
