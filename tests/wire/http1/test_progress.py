from __future__ import annotations

import pytest

from modelserver.wire.limits import Progress, TimeLimits

TIMES = TimeLimits(body_pause_s=30, body_window_s=60, body_rate=1000)


def test_a_pause_is_counted_from_the_last_byte() -> None:
    progress = Progress()
    assert progress.paused_s(100, 5) == 0
    assert progress.paused_s(110, 5) == 10
    assert progress.paused_s(111, 6) == 0
    assert progress.paused_s(115, 6) == 4
    progress.restart()
    assert progress.paused_s(200, 6) == 0


@pytest.mark.parametrize(("pause_s", "is_too_slow"), [(30, False), (31, True)])
def test_a_body_may_pause_for_so_long(pause_s: int, is_too_slow: bool) -> None:
    progress = Progress()
    assert not progress.is_too_slow(0, 10, TIMES)
    assert progress.is_too_slow(pause_s, 10, TIMES) is is_too_slow


@pytest.mark.parametrize(("rate", "ends_s"), [(1000, None), (999, 60)])
def test_a_body_must_come_at_a_rate(rate: int, ends_s: int | None) -> None:
    progress = Progress()
    ends = [now_s for now_s in range(300) if progress.is_too_slow(now_s, now_s * rate, TIMES)]
    assert (ends[0] if ends else None) == ends_s


def test_a_body_that_was_fast_once_must_stay_so() -> None:
    progress = Progress()
    assert not any(progress.is_too_slow(now_s, 1_000_000 + now_s, TIMES) for now_s in range(1))
    assert not any(progress.is_too_slow(now_s, 2_000_000 + now_s, TIMES) for now_s in range(1, 61))
    assert any(progress.is_too_slow(now_s, 2_000_000 + now_s, TIMES) for now_s in range(61, 122))
