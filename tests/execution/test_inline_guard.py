from __future__ import annotations

import sys
import threading

import pytest

from modelserver.execution.inline import INLINE_BUDGET_NS, InlineGuard, thread_use

FAST, SLOW, VERY_SLOW, HOPELESS = INLINE_BUDGET_NS, INLINE_BUDGET_NS + 1, 100 * INLINE_BUDGET_NS, 500 * INLINE_BUDGET_NS


def _calls(*durations_ns: int, cpu_ns: int = 0, waits: int = 0, forced: int = 0) -> int:
    """How often it told, of executions that used so much CPU time each, waited, and were made to wait."""
    calls: list[None] = []
    use = (0, 0, 0)
    guard = InlineGuard(lambda: calls.append(None), lambda: use)
    for duration_ns in durations_ns:  # as its caller does
        if guard.is_worried:
            guard.begin()
        use = (use[0] + cpu_ns, use[1] + waits, use[2] + forced)
        if duration_ns > INLINE_BUDGET_NS or guard.is_worried:
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


@pytest.mark.parametrize(
    ("cpu_ns", "waits", "forced", "is_too_slow"),
    [(0, 0, 0, True), (0, 0, 1, False), (0, 1, 1, True), (VERY_SLOW, 0, 0, True), (VERY_SLOW, 0, 1, True)],
)
def test_a_busy_machine_is_not_the_model_s_fault(cpu_ns: int, waits: int, forced: int, is_too_slow: bool) -> None:
    calls = _calls(*[VERY_SLOW] * 100, cpu_ns=cpu_ns, waits=waits, forced=forced)
    assert bool(calls) is is_too_slow


def test_the_thread_s_own_use() -> None:
    before = thread_use()
    while thread_use()[0] < before[0] + 1_000_000:
        pass
    threading.Event().wait(0.001)
    cpu_ns, num_waits, num_forced = (now - then for now, then in zip(thread_use(), before, strict=True))
    assert cpu_ns >= 1_000_000
    assert num_waits >= (1 if sys.platform == "linux" else 0)
    assert num_forced >= 0
