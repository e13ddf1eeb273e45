from math import inf

import pytest

from modelserver.repository.residents import Resident, idle_ones, plan_room


def resident(
    key: str, num_bytes: int, last_use_s: float, *, keep_alive_s: float = 10.0, can_leave: bool = True
) -> Resident:
    return Resident(key, num_bytes, last_use_s, keep_alive_s, can_leave)


FULL = [resident("old", 40, 1.0), resident("new", 40, 3.0), resident("mid", 20, 2.0)]


@pytest.mark.parametrize(
    ("needed", "budget", "expected"),
    [
        (0, 100, ()),
        (10, 100, ("old",)),
        (50, 100, ("old", "mid")),
        (100, 100, ("old", "mid", "new")),
        (101, 100, None),
    ],
)
def test_the_least_recently_used_leave_first(needed: int, budget: int, expected: tuple[str, ...] | None) -> None:
    assert plan_room(FULL, needed, budget) == expected


def test_who_may_not_leave_stays() -> None:
    busy = [resident("busy", 40, 0.0, can_leave=False), *FULL]
    assert plan_room(busy, 20, 140) == ("old",)
    assert plan_room(busy, 101, 140) is None


def test_who_gives_no_room_need_not_leave() -> None:
    assert plan_room([resident("empty", 0, 0.0), resident("full", 10, 1.0)], 5, 10) == ("full",)


def test_idle_ones_leave_when_their_time_is_over() -> None:
    everyone = [
        resident("idle", 1, 0.0),
        resident("used", 1, 5.0),
        resident("pinned", 1, 0.0, can_leave=False),
        resident("kept", 1, 0.0, keep_alive_s=inf),
    ]
    assert idle_ones(everyone, 10.0) == ["idle"]
    assert idle_ones(everyone, 15.0) == ["idle", "used"]
