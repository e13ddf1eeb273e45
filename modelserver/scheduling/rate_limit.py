"""Which instance may execute, when several need the same resources: --rate-limit=execution_count.

An instance claims what its `rate_limiter` names, executes when the claim is granted, and gives it back. The claim with
the fewest executions goes first; one of priority 2 counts each twice. A claim that waits for a resource keeps it from
those behind it only. So large claims do not starve, and no resource lies idle that no claim in front needs.

`LimitedSource` takes no batch before its instance has its resources. So requests wait in their queue, where they can be
cancelled, expire, and be joined by others, and where other instances of the model may take them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric

from modelserver.config.resources import ResourceLimit
from modelserver.config.schema import ModelRateLimiter
from modelserver.core.request import Delivery
from modelserver.errors import ConfigError
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.parked_workers import WaitingWorker
from modelserver.scheduling.scheduler import BatchSource
from modelserver.telemetry.counts import ResourceUse, limiter_families

# A resource on a device; on none, if it is global.
Place = tuple[str, int | None]


class Claim:
    """The resources that one instance needs, and whether it has them. The limiter changes it under its lock."""

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

    Without `limits` each resource has the size of the largest claim, so that instances which need all of it execute one
    at a time. With limits only the resources that they name exist.
    """

    def __init__(self, limits: Sequence[ResourceLimit] = ()) -> None:
        self._limits = {(limit.name, limit.device): limit.count for limit in limits}
        self._lock = threading.Lock()
        self._claims: list[Claim] = []
        self._waiting: list[Claim] = []
        self._used: dict[Place, int] = {}
        self._num_arrivals = 0
        # The count of the last claim granted. A claim that returns after a pause begins there, with no arrears.
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
        """Whether the instance may execute now. If not, it waits, and `wake` is called when it should ask again.

        If it has executed, it first gives back its resources, and then queues behind the claims that waited meanwhile.
        `wake` is called at most once, under the lock, so it only gives a signal.
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
        """Give back the resources, or stop waiting for them. Safe to repeat."""
        with self._lock:
            if has_executed:
                self._count(claim)
            self._take_back(claim)
            self._allot()

    def nudge(self, claim: Claim) -> None:
        """Wake the instance if it waits, because something else has changed for it."""
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

    def families(self) -> list[Metric]:
        """The metric families of the resources and of the waiting instances. Triton has no such metrics."""
        return limiter_families(self.uses(), self.num_waiting)

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


class LimitedSource:
    """A source of batches for an instance that needs resources; wraps the source of its worker.

    A worker that comes back for more is done with what it took.
    """

    takes_ahead = False  # resources are granted for one execution

    def __init__(self, source: BatchSource, limiter: RateLimiter, claim: Claim) -> None:
        self._source = source
        self._limiter = limiter
        self._claim = claim
        self._is_executing = False
        self.is_shared = source.is_shared

    def try_take(self, worker: WaitingWorker) -> tuple[Batch | None, int | None]:
        """As `BatchSource.try_take`; None and None while the instance waits for resources: these wake the worker.

        A closed worker needs none: it only ends, or ends its sequences.
        """
        has_executed, self._is_executing = self._is_executing, False
        if worker.is_closed:
            self._limiter.release(self._claim, has_executed=has_executed)
        elif not self._limiter.acquire(self._claim, _ignore, has_executed=has_executed):
            # `pass_on` comes first: it may clear the worker's signal, which must not be the limiter's.
            self._source.pass_on(worker)
            if not self._limiter.acquire(self._claim, worker.wake):
                if _is_closed(worker):
                    # It was closed in between, while it did not count as parked.
                    self._limiter.nudge(self._claim)
                return None, None
        batch, wait_until_ns = self._source.try_take(worker)
        self._is_executing = batch is not None
        if batch is None:
            self._limiter.release(self._claim, has_executed=False)
        return batch, wait_until_ns

    def pass_on(self, worker: WaitingWorker) -> None:
        """As `BatchSource.pass_on`; no resources are held meanwhile."""
        has_executed, self._is_executing = self._is_executing, False
        self._limiter.release(self._claim, has_executed=has_executed)
        self._source.pass_on(worker)

    def take_more(self, worker: WaitingWorker, limit: int) -> list[Batch]:  # noqa: ARG002
        """Nothing: the resources are granted for one execution."""
        return []

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        self._source.deliver(deliveries)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        self._source.post(callback, *args)

    @property
    def num_sequences(self) -> int:
        return self._source.num_sequences

    def give_up(self) -> None:
        self._source.give_up()

    def close_worker(self, worker: WaitingWorker) -> None:
        self._source.close_worker(worker)
        self._limiter.nudge(self._claim)


def _is_closed(worker: WaitingWorker) -> bool:
    """The current value: another thread may have closed the worker since the last look."""
    return worker.is_closed


def _ignore() -> None:
    """The caller asks again at once."""
