"""Traces of the policy: who is granted what, in which order. `A` executes means: acquired, and released at once."""

from __future__ import annotations

import functools
import random

import pytest
from support.integrity import check_integrity

from modelserver.config.resources import ResourceLimit
from modelserver.config.schema import ModelRateLimiter, RateLimiterResource
from modelserver.errors import ConfigError
from modelserver.scheduling.rate_limit import Claim, RateLimiter
from modelserver.telemetry.counts import ResourceUse


class Scene:
    """Instances by name, and who was woken since one last looked."""

    def __init__(self, *limits: ResourceLimit) -> None:
        self.limiter = RateLimiter(limits)
        self.claims: dict[str, Claim] = {}
        self.woken: list[str] = []

    def join(self, name: str, *, priority: int = 0, device: int = 0, is_global: bool = False, **counts: int) -> None:
        resources = tuple(RateLimiterResource(key, is_global, count) for key, count in counts.items())
        self.claims[name] = self.limiter.join(name, device, ModelRateLimiter(resources, priority))

    def acquire(self, name: str, *, has_executed: bool = False) -> bool:
        self.woken.clear()
        wake = functools.partial(self.woken.append, name)
        granted = self.limiter.acquire(self.claims[name], wake, has_executed=has_executed)
        check_integrity(self.limiter)
        return granted

    def execute(self, name: str) -> str:
        """Who executes after one that would like to execute again."""
        return name if self.acquire(name, has_executed=True) else self.woken[0]

    def release(self, name: str, *, has_executed: bool = True) -> list[str]:
        """Who is granted by it."""
        self.woken.clear()
        self.limiter.release(self.claims[name], has_executed=has_executed)
        check_integrity(self.limiter)
        return list(self.woken)


def test_one_at_a_time_has_a_resource() -> None:
    scene = Scene()
    scene.join("a", R=1)
    scene.join("b", R=1)
    assert scene.acquire("a")
    assert not scene.acquire("b")
    assert scene.release("a") == ["b"]
    assert scene.acquire("b")
    assert scene.release("b") == []


def test_without_limits_there_is_what_the_most_demanding_needs() -> None:
    scene = Scene()
    scene.join("a", R=1)
    scene.join("b", R=3)
    scene.join("c", R=2)
    assert scene.acquire("a")
    assert scene.acquire("c")
    assert not scene.acquire("b")
    assert scene.limiter.uses() == [ResourceUse("R", 0, 3, 3)]


def test_limits_let_several_execute() -> None:
    scene = Scene(ResourceLimit("R", 2))
    for name in "abc":
        scene.join(name, R=1)
    assert [scene.acquire(name) for name in "abc"] == [True, True, False]
    assert scene.release("b") == ["c"]


def test_resources_of_devices_are_their_own() -> None:
    scene = Scene(ResourceLimit("R", 1), ResourceLimit("R", 2, 1))
    scene.join("a0", R=1, device=0)
    scene.join("b0", R=1, device=0)
    scene.join("a1", R=1, device=1)
    scene.join("b1", R=1, device=1)
    assert [scene.acquire(name) for name in ("a0", "b0", "a1", "b1")] == [True, False, True, True]


def test_global_resources_are_those_of_all_devices() -> None:
    scene = Scene()
    scene.join("a", R=1, device=0, is_global=True)
    scene.join("b", R=1, device=1, is_global=True)
    assert [scene.acquire(name) for name in "ab"] == [True, False]


def test_all_resources_are_had_or_none() -> None:
    scene = Scene()
    scene.join("a", R=1)
    scene.join("b", R=1, S=1)
    scene.join("c", S=1)
    assert scene.acquire("a")
    assert not scene.acquire("b")
    assert not scene.acquire("c")  # b is first in line for S
    assert scene.release("a") == ["b"]
    assert scene.release("b") == ["c"]


def test_who_needs_nothing_of_what_others_wait_for_passes() -> None:
    scene = Scene()
    scene.join("a", R=1)
    scene.join("b", R=1)
    scene.join("c", S=1)
    assert [scene.acquire(name) for name in "abc"] == [True, False, True]


def test_a_large_claim_does_not_starve() -> None:
    scene = Scene(ResourceLimit("R", 2))
    scene.join("small", R=1)
    scene.join("other", R=1)
    scene.join("large", R=2)
    assert scene.acquire("small")
    assert not scene.acquire("large")
    assert not scene.acquire("other")
    assert scene.release("small") == ["large"]


@pytest.mark.parametrize(
    ("priorities", "shares"), [((1, 2), (2, 1)), ((1, 1), (1, 1)), ((1, 3), (3, 1)), ((0, 1), (1, 1))]
)
def test_priorities_share_what_is_contested(priorities: tuple[int, int], shares: tuple[int, int]) -> None:
    scene = Scene()
    scene.join("blocker", R=1)
    for name, priority in zip("ab", priorities, strict=True):
        scene.join(name, priority=priority, R=1)
    executions = {"a": 0, "b": 0}
    scene.acquire("blocker")
    scene.acquire("a")
    scene.acquire("b")
    [current] = scene.release("blocker")
    for _ in range(1200):
        executions[current] += 1
        current = scene.execute(current)
    total = sum(executions.values())
    for name, share in zip("ab", shares, strict=True):
        assert executions[name] == pytest.approx(total * share / sum(shares), abs=2)


def test_who_paused_makes_up_for_nothing() -> None:
    scene = Scene()
    scene.join("a", R=1)
    scene.join("b", R=1)
    for _ in range(100):
        assert scene.acquire("a")
        scene.release("a")
    order = []
    scene.acquire("a")
    scene.acquire("b")
    current = "a"
    for _ in range(6):
        order.append(current)
        current = scene.execute(current)
    assert order.count("b") == 3


def test_what_was_granted_for_nothing_is_not_counted() -> None:
    scene = Scene()
    scene.join("a", R=1)
    scene.join("b", R=1)
    for _ in range(5):
        assert scene.acquire("a")
        scene.release("a", has_executed=False)
    assert scene.acquire("b")
    scene.release("b")
    assert scene.claims["a"].count_after == 1
    assert scene.claims["b"].count_after == 2


def test_who_leaves_gives_back_and_waits_no_more() -> None:
    scene = Scene()
    for name in "abc":
        scene.join(name, R=1)
    scene.acquire("a")
    scene.acquire("b")
    scene.acquire("c")
    scene.limiter.leave(scene.claims["b"])
    scene.limiter.leave(scene.claims["a"])
    scene.limiter.leave(scene.claims["a"])
    assert scene.woken == ["c"]
    check_integrity(scene.limiter)


def test_a_nudge_wakes_who_waits_once() -> None:
    scene = Scene()
    scene.join("a", R=1)
    scene.join("b", R=1)
    scene.acquire("a")
    scene.acquire("b")
    scene.limiter.nudge(scene.claims["b"])
    scene.limiter.nudge(scene.claims["b"])
    assert scene.woken == ["b"]
    assert scene.limiter.num_waiting == 1


def test_what_could_never_execute_is_refused() -> None:
    scene = Scene(ResourceLimit("R", 2), ResourceLimit("S", 5, 1))
    with pytest.raises(ConfigError, match=r'"R" is limited to 2 .* minimum required count is 3'):
        scene.join("a", R=3)
    with pytest.raises(ConfigError, match='"S" is limited to 0'):
        scene.join("a", S=1)
    with pytest.raises(ConfigError, match='"T" is limited to 0'):
        scene.join("a", T=1)
    assert scene.limiter.uses() == []


def test_a_resource_is_global_or_not() -> None:
    scene = Scene()
    scene.join("a", R=1)
    with pytest.raises(ConfigError, match="'R' is global in the rate_limiter of 'b' and per device in that of 'a'"):
        scene.join("b", R=1, is_global=True)


def test_nobody_waits_in_vain_whatever_happens() -> None:
    scene = Scene(ResourceLimit("R", 4), ResourceLimit("S", 2))
    chance = random.Random(1)
    for number in range(8):
        scene.join(str(number), priority=chance.randrange(3), R=chance.randrange(1, 5), S=chance.randrange(3))
    for _ in range(3000):
        name = chance.choice(list(scene.claims))
        if scene.claims[name].is_granted:
            scene.release(name, has_executed=chance.random() < 0.8)
        else:
            scene.acquire(name)
