"""Which instance may execute, when several need the same resources: --rate-limit=execution_count.

An instance claims what its `rate_limiter` names, executes when it is granted, and gives it back. Whoever has executed
least goes first, a claim of priority 2 counting each time twice. One that has to wait for a resource keeps it from
those behind it, and from nobody else; so neither do large claims starve, nor does anything lie idle that no one in
front needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from modelserver.config.schema import ModelRateLimiter
from modelserver.errors import ConfigError
from modelserver.options.resources import ResourceLimit
from modelserver.telemetry.rate_limit import ResourceUse

# A resource on a device; on none, if it is global.
Place = tuple[str, int | None]


class Claim:
    """What one instance needs, and how it stands with it. The limiter changes it under its lock."""

    __slots__ = ("arrival", "count_after", "demands", "is_granted", "is_waiting", "name", "priority", "wake")

    def __init__(self, name: str, demands: dict[Place, int], priority: int) -> None:
        self.name = name
        self.demands = demands
        self.priority = priority
        # Executions times priority, this one included: the order of claims.
        self.count_after = priority
        self.is_waiting = False
        self.is_granted = False
        self.arrival = 0
        self.wake: Callable[[], None] | None = None


class RateLimiter:
    """The resources of a server. `_lock` guards everything; from any thread.

    Without `limits` there is of each resource what the most demanding instance needs, so that one at a time executes
    of those that need it all; with limits there is nothing but what they give.
    """

    def __init__(self, limits: Sequence[ResourceLimit] = ()) -> None:
        self._limits = {(limit.name, limit.device): limit.count for limit in limits}
        self._lock = threading.Lock()
        self._claims: list[Claim] = []
        self._waiting: list[Claim] = []
        self._used: dict[Place, int] = {}
        self._num_arrivals = 0
        # The count of who was granted last: who comes after a pause begins there, and makes up for nothing.
        self._floor = 0

    def join(self, name: str, device: int, wish: ModelRateLimiter) -> Claim:
        """The claim of a new instance called `name`, on a device.

        Raises ConfigError if it could never execute, or names a resource otherwise than others do.
        """
        demands: dict[Place, int] = {}
        for resource in wish.resources:
            place = (resource.name, None if resource.global_ else device)
            if resource.count:
                demands[place] = demands.get(place, 0) + resource.count
        claim = Claim(name, demands, max(1, wish.priority))
        with self._lock:
            for place, count in demands.items():
                self._check(claim, place, count)
            self._claims.append(claim)
        return claim

    def leave(self, claim: Claim) -> None:
        """The instance is gone. Safe to repeat."""
        with self._lock:
            if claim not in self._claims:
                return
            self._claims.remove(claim)
            self._take_back(claim)
            self._allot()

    def acquire(self, claim: Claim, wake: Callable[[], None], *, has_executed: bool = False) -> bool:
        """Whether the instance may execute now. If not, it waits, and `wake` says that it is worth to ask again.

        If it has executed, it first gives back what it had, and then stands in line with those that waited meanwhile.
        `wake` is called once at most, under the lock, so it only gives a signal.
        """
        with self._lock:
            if has_executed:
                self._count(claim)
                self._take_back(claim)
            if not claim.is_granted and not claim.is_waiting:
                self._num_arrivals += 1
                claim.arrival = self._num_arrivals
                claim.is_waiting = True
                claim.count_after = max(claim.count_after, self._floor + claim.priority)
                self._waiting.append(claim)
            claim.wake = None
            self._allot()
            if not claim.is_granted:
                claim.wake = wake
            return claim.is_granted

    def release(self, claim: Claim, *, has_executed: bool = True) -> None:
        """Give back what was granted, or wait no more. Safe to repeat."""
        with self._lock:
            if has_executed:
                self._count(claim)
            self._take_back(claim)
            self._allot()

    def nudge(self, claim: Claim) -> None:
        """Wake who waits, because there is something else for it to see."""
        with self._lock:
            _wake(claim)

    def uses(self) -> list[ResourceUse]:
        """Every resource that an instance needs, by name and device."""
        with self._lock:
            places = sorted({place for claim in self._claims for place in claim.demands}, key=_by_name)
            return [ResourceUse(*place, self._capacity(place), self._used.get(place, 0)) for place in places]

    @property
    def num_waiting(self) -> int:
        """Instances that wait for resources."""
        return len(self._waiting)

    def check_integrity(self) -> None:
        """Assert that the accounts are right, and that nobody waits in vain. For tests."""
        with self._lock:
            used: dict[Place, int] = {}
            for claim in self._claims:
                assert not (claim.is_granted and claim.is_waiting), f"{claim.name} waits for what it has"
                for place, count in claim.demands.items() if claim.is_granted else ():
                    used[place] = used.get(place, 0) + count
            assert used == {place: count for place, count in self._used.items() if count}, "resources are miscounted"
            # Without limits, there is less as soon as the most demanding instance has left.
            assert not self._limits or all(count <= self._capacity(place) for place, count in used.items()), "overuse"
            before = len(self._waiting)
            self._allot()
            assert len(self._waiting) == before, "a claim waited although it could be granted"

    def _allot(self) -> None:
        """Grant what can be granted, in order. Called with the lock held."""
        blocked: set[Place] = set()
        for claim in sorted(self._waiting, key=lambda claim: (claim.count_after, claim.arrival)):
            if blocked.isdisjoint(claim.demands) and all(
                self._used.get(place, 0) + count <= self._capacity(place) for place, count in claim.demands.items()
            ):
                for place, count in claim.demands.items():
                    self._used[place] = self._used.get(place, 0) + count
                self._waiting.remove(claim)
                claim.is_waiting = False
                claim.is_granted = True
                _wake(claim)
            else:
                blocked.update(claim.demands)

    def _count(self, claim: Claim) -> None:
        if claim.is_granted:
            self._floor = max(self._floor, claim.count_after - claim.priority)
            claim.count_after += claim.priority

    def _take_back(self, claim: Claim) -> None:
        if claim.is_granted:
            for place, count in claim.demands.items():
                self._used[place] -= count
        elif claim.is_waiting:
            self._waiting.remove(claim)
        claim.is_granted = claim.is_waiting = False
        claim.wake = None

    def _capacity(self, place: Place) -> int:
        name, _device = place
        if self._limits:
            return self._limits.get(place, self._limits.get((name, None), 0))
        return max((claim.demands.get(place, 0) for claim in self._claims), default=0)

    def _check(self, claim: Claim, place: Place, count: int) -> None:
        name, device = place
        for other in self._claims:
            for other_name, other_device in other.demands:
                if other_name == name and (other_device is None) != (device is None):
                    scopes = ("global", "per device") if device is None else ("per device", "global")
                    raise ConfigError(
                        f"Resource '{name}' is {scopes[0]} in the rate_limiter of '{claim.name}' and {scopes[1]} in "
                        f"that of '{other.name}'; let both say the same"
                    )
        if self._limits and (capacity := self._capacity(place)) < count:
            raise ConfigError(
                f'Resource count for "{name}" is limited to {capacity} which will prevent scheduling of one or more '
                f"model instances, the minimum required count is {count}: '{claim.name}' needs them; "
                "raise --rate-limit-resource"
            )


def _wake(claim: Claim) -> None:
    wake, claim.wake = claim.wake, None
    if wake is not None:
        wake()


def _by_name(place: Place) -> tuple[str, int]:
    name, device = place
    return name, -1 if device is None else device


def limits_something(wishes: Iterable[ModelRateLimiter | None]) -> bool:
    """Whether any of these needs resources."""
    return any(wish is not None and wish.resources for wish in wishes)
