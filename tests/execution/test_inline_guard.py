from __future__ import annotations

import pytest

from modelserver.execution.inline_guard import INLINE_BUDGET_NS, InlineGuard

FAST, SLOW, VERY_SLOW, HOPELESS = INLINE_BUDGET_NS, INLINE_BUDGET_NS + 1, 100 * INLINE_BUDGET_NS, 500 * INLINE_BUDGET_NS


def _calls(*durations_ns: int) -> int:
    calls: list[None] = []
    guard = InlineGuard(lambda: calls.append(None))
    for duration_ns in durations_ns:
        if duration_ns > INLINE_BUDGET_NS or guard.is_worried:  # as its caller asks
            guard.note(duration_ns)
    return len(calls)


@pytest.mark.parametrize(
    ("durations_ns", "is_too_slow"),
    [
        ([FAST] * 1000, False),
        ([VERY_SLOW], False),  # one may be an accident
        ([VERY_SLOW] * 3, False),
        ([VERY_SLOW] * 4, True),
        ([VERY_SLOW, *[FAST] * 4] * 1000, False),
        ([VERY_SLOW, *[FAST] * 2] * 8, True),
        ([HOPELESS], False),
        ([HOPELESS, HOPELESS], True),
        ([SLOW] * 15, False),
        ([SLOW] * 16, True),
        ([SLOW, FAST] * 1000, False),
        ([SLOW, SLOW, FAST] * 16, True),
    ],
)
def test_what_is_too_slow(durations_ns: list[int], is_too_slow: bool) -> None:
    assert bool(_calls(*durations_ns)) is is_too_slow


def test_it_tells_again_when_nothing_was_done() -> None:
    assert _calls(*[VERY_SLOW] * 12) == 3
