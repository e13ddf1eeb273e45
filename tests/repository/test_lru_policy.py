from math import inf

import pytest

from modelserver.repository.lru_policy import LoadedModel, idle_models, plan_room


def loaded(
    key: str, num_bytes: int, last_use_s: float, *, keep_alive_s: float = 10.0, can_leave: bool = True
) -> LoadedModel:
    return LoadedModel(key, num_bytes, last_use_s, keep_alive_s, can_leave)


FULL = [loaded("old", 40, 1.0), loaded("new", 40, 3.0), loaded("mid", 20, 2.0)]


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
    busy = [loaded("busy", 40, 0.0, can_leave=False), *FULL]
    assert plan_room(busy, 20, 140) == ("old",)
    assert plan_room(busy, 101, 140) is None


def test_who_gives_no_room_need_not_leave() -> None:
    assert plan_room([loaded("empty", 0, 0.0), loaded("full", 10, 1.0)], 5, 10) == ("full",)


def test_idle_ones_leave_when_their_time_is_over() -> None:
    everyone = [
        loaded("idle", 1, 0.0),
        loaded("used", 1, 5.0),
        loaded("pinned", 1, 0.0, can_leave=False),
        loaded("kept", 1, 0.0, keep_alive_s=inf),
    ]
    assert idle_models(everyone, 10.0) == ["idle"]
    assert idle_models(everyone, 15.0) == ["idle", "used"]
