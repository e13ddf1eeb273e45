from __future__ import annotations

import pytest

from modelserver.execution.process.recipe import RestartOptions, RestartPolicy

OPTIONS = RestartOptions(window_s=60.0, first_pause_s=0.25, max_pause_s=2.0)


@pytest.mark.parametrize(
    ("crashes_s", "pauses_s"),
    [
        ([10.0], [0.0]),
        ([10.0, 11.0, 12.0, 13.0, 14.0, 15.0], [0.0, 0.25, 0.5, 1.0, 2.0, 2.0]),
        ([0.0, 61.0, 122.0], [0.0, 0.0, 0.0]),  # one crash a window is always forgiven
        ([0.0, 50.0, 70.0], [0.0, 0.25, 0.25]),  # the first one has left the window
    ],
)
def test_pauses_grow_with_the_crashes_in_the_window(crashes_s: list[float], pauses_s: list[float]) -> None:
    policy = RestartPolicy(OPTIONS)
    assert [policy.pause_after_crash(now_s) for now_s in crashes_s] == pauses_s


def test_a_thousand_crashes_still_give_the_longest_pause() -> None:
    policy = RestartPolicy(OPTIONS)
    assert [policy.pause_after_crash(0.01 * number) for number in range(2000)][-1] == 2.0
