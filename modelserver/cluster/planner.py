"""Decides what happens to the replicas of a pool: pure, so that traces show rollouts, failures and scaling.

A replica's life, as the planner sees it:

    PENDING ──> STARTING ──> READY <──> UNREACHABLE (its host does not report)
       │            │          │
       │            └──────────┴──> FAILED (its server has ended) ──> STARTING again, after a pause
       └──────── LOST (its host has ended): forgotten        any ──> DRAINING ──> STOPPED: forgotten

Times are seconds of a monotonic clock that the caller reads.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from modelserver.cluster.deployment import Pool

# A replica whose host has not reported for so long is replaced; if it comes back, one too many is drained.
UNREACHABLE_AFTER_S: Final = 3.0
REPLACED_AFTER_S: Final = 10.0
# A server that was ready for so long has recovered: the pauses before restarts begin anew.
RECOVERED_AFTER_S: Final = 60.0
MAX_PAUSE_S: Final = 300.0


class ReplicaState(enum.Enum):
    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


_ENDED: Final = frozenset({ReplicaState.STOPPED, ReplicaState.LOST})
# Which of several goes first when there are too many.
_WORTH: Final = {
    ReplicaState.FAILED: 0,
    ReplicaState.PENDING: 1,
    ReplicaState.STARTING: 2,
    ReplicaState.UNREACHABLE: 3,
    ReplicaState.READY: 4,
}


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as it was last seen. `num_failures` counts the ends of its server since it was last well;
    `is_cordoned` says that the operator wants it replaced."""

    name: str
    revision: str
    state: ReplicaState = ReplicaState.PENDING
    since_s: float = 0.0
    num_failures: int = 0
    was_ready: bool = False
    is_cordoned: bool = False
    ongoing: int = 0
    problem: str = ""

    def seen(self, state: ReplicaState, now_s: float, *, ongoing: int = 0, problem: str = "") -> Replica:
        """The replica after it was seen in `state`."""
        is_new = state is not self.state
        failures = self.num_failures
        if is_new and state is ReplicaState.FAILED:
            failures += 1
        elif not is_new and state is ReplicaState.READY and now_s - self.since_s >= RECOVERED_AFTER_S:
            failures = 0
        return replace(
            self,
            state=state,
            since_s=now_s if is_new else self.since_s,
            num_failures=failures,
            was_ready=self.was_ready or state is ReplicaState.READY,
            ongoing=ongoing,
            problem=problem,
        )


class ActionKind(enum.Enum):
    START = "start"
    RESTART = "restart"
    DRAIN = "drain"
    STOP = "stop"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Action:
    """`replica` is empty for START, which makes one of `pool`. STOP ends a replica that serves nothing."""

    kind: ActionKind
    pool: Pool
    replica: str = ""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What is wanted of a pool, and what the planner remembers.

    `stable` is the last pool all of whose replicas became ready; `rejected` says why `pool` was given up for it.
    `held` is the number of replicas that the operator set. `is_leaving` pools end when their last replica has.
    """

    pool: Pool
    stable: Pool | None = None
    rejected: str = ""
    held: int | None = None
    is_leaving: bool = False
    wanted: int = 0
    # Replicas that failed before they were ready, since one last became ready; and the last of these failures.
    num_failed_starts: int = 0
    failed_start_s: float = 0.0
    problem: str = ""
    counted: frozenset[tuple[str, int]] = frozenset()
    high_since_s: float | None = None
    low_since_s: float | None = None
    low_peak: int = 0

    @classmethod
    def begin(cls, pool: Pool) -> PoolPlan:
        return cls(pool, wanted=pool.replicas.min)

    def deployed(self, pool: Pool) -> PoolPlan:
        """The plan after the operator deployed `pool`, which may be the same one once more."""
        wanted = min(max(self.wanted, pool.replicas.min), pool.replicas.max)
        return replace(
            self, pool=pool, rejected="", held=None, is_leaving=False, wanted=wanted, num_failed_starts=0, problem=""
        )

    @property
    def target(self) -> Pool:
        """The servers to have: the deployed ones, or the previous ones after a rollback."""
        return self.stable if self.rejected and self.stable is not None else self.pool


@dataclass(slots=True)
class _Count:
    """The replicas of a pool, sorted by what they are to its plan."""

    new: list[Replica] = field(default_factory=list)
    old: list[Replica] = field(default_factory=list)
    ended: list[Replica] = field(default_factory=list)


def plan(
    before: PoolPlan, replicas: Sequence[Replica], demand: int | None, now_s: float
) -> tuple[PoolPlan, list[Action]]:
    """The actions for one pool, and the plan to go on with.

    `demand` is the number of requests in flight or waiting; None when no router or server could be asked. The
    caller applies all actions before it plans again.
    """
    after = _scale(_account(before, replicas, now_s), demand, now_s)
    count = _sort(after, replicas, now_s)
    actions = [Action(ActionKind.FORGET, after.target, each.name) for each in count.ended]
    actions += _replace(after, count)
    removed = {action.replica for action in actions}
    actions += _restart(after, [each for each in count.new if each.name not in removed], now_s)
    actions += _start(after, count, now_s)
    return _settle(after, count), actions


def pause_s(num_failures: int) -> float:
    """How long after the last of several failures a server is started again: at once, then 2 s, 4 s, … 300 s."""
    return 0.0 if num_failures < 2 else min(2.0 ** (num_failures - 1), MAX_PAUSE_S)


def _account(before: PoolPlan, replicas: Sequence[Replica], now_s: float) -> PoolPlan:
    """Count the starts that failed, each once, and roll back after too many of the deployed servers."""
    target = before.target.revision
    current = [each for each in replicas if each.revision == target]
    failed = {
        (each.name, each.num_failures): each
        for each in current
        if each.state in (ReplicaState.FAILED, ReplicaState.LOST) and not each.was_ready
    }
    news = [each for key, each in failed.items() if key not in before.counted]
    after = replace(before, counted=frozenset(failed))
    if news:
        problem = next((each.problem for each in reversed(news) if each.problem), before.problem)
        after = replace(
            after,
            num_failed_starts=before.num_failed_starts + len(news),
            failed_start_s=now_s,
            problem=problem or "the host of the replica was lost before its server was ready",
        )
    elif any(each.state is ReplicaState.READY for each in current) and not failed:
        after = replace(after, num_failed_starts=0, problem="")
    stable = before.stable
    if (
        not before.rejected
        and stable is not None
        and stable.revision != target
        and after.num_failed_starts >= before.pool.rollout.max_failed_starts
    ):
        return replace(after, rejected=after.problem, num_failed_starts=0, counted=frozenset())
    return after


def _scale(before: PoolPlan, demand: int | None, now_s: float) -> PoolPlan:
    """Follow the demand: up after it was higher for a while, down to its highest of a longer while."""
    bounds = before.pool.replicas
    if before.is_leaving or before.held is not None:
        wanted = 0 if before.held is None or before.is_leaving else before.held
        return replace(before, wanted=wanted, high_since_s=None, low_since_s=None)
    wanted = min(max(before.wanted, bounds.min), bounds.max)
    if demand is None:
        return replace(before, wanted=wanted)
    needed = min(max(math.ceil(demand / bounds.target_ongoing_requests), bounds.min), bounds.max)
    if needed > wanted:
        since_s = now_s if before.high_since_s is None else before.high_since_s
        if wanted and now_s - since_s < bounds.upscale_delay_s:
            return replace(before, wanted=wanted, high_since_s=since_s, low_since_s=None)
        return replace(before, wanted=needed, high_since_s=None, low_since_s=None)
    if needed == wanted:
        return replace(before, wanted=wanted, high_since_s=None, low_since_s=None)
    if before.low_since_s is None:
        return replace(before, wanted=wanted, high_since_s=None, low_since_s=now_s, low_peak=needed)
    peak, elapsed_s = max(before.low_peak, needed), now_s - before.low_since_s
    if not peak and elapsed_s >= bounds.to_zero_after_s:
        return replace(before, wanted=0, high_since_s=None, low_since_s=None)
    if wanted > max(peak, 1) and elapsed_s >= bounds.downscale_delay_s:
        # Without any demand the time until the last one ends goes on.
        return replace(before, wanted=max(peak, 1), high_since_s=None, low_since_s=None if peak else before.low_since_s)
    return replace(before, wanted=wanted, high_since_s=None, low_peak=peak)


def _sort(after: PoolPlan, replicas: Sequence[Replica], now_s: float) -> _Count:
    count, revision = _Count(), after.target.revision
    for each in replicas:
        if each.state in _ENDED:
            count.ended.append(each)
        elif each.state is ReplicaState.DRAINING or _is_missing(each, now_s):
            continue
        elif each.revision == revision and not each.is_cordoned:
            count.new.append(each)
        else:
            count.old.append(each)
    return count


def _is_missing(replica: Replica, now_s: float) -> bool:
    return replica.state is ReplicaState.UNREACHABLE and now_s - replica.since_s >= REPLACED_AFTER_S


def _replace(after: PoolPlan, count: _Count) -> Iterator[Action]:
    """End what is too much: of the new ones those beyond the wanted number, and the old ones as new ones take over."""
    num_surplus = max(0, len(count.new) - after.wanted)
    surplus = _least_worth_first(count.new)[:num_surplus] if num_surplus else []
    yield from (_end(after, each) for each in surplus)
    num_ready = sum(each.state is ReplicaState.READY for each in (*count.new, *count.old))
    num_ready -= sum(each.state is ReplicaState.READY for each in surplus)
    num_needed = after.wanted - after.target.rollout.max_unavailable if after.wanted else 0
    for each in _least_worth_first(count.old):
        if each.state is ReplicaState.READY:
            if num_ready <= num_needed:
                break
            num_ready -= 1
        yield _end(after, each)


def _least_worth_first(replicas: Iterable[Replica]) -> list[Replica]:
    """The youngest first among equals."""
    return sorted(replicas, key=lambda each: (_WORTH[each.state], -each.since_s, each.name))


def _end(after: PoolPlan, replica: Replica) -> Action:
    serves = replica.state in (ReplicaState.READY, ReplicaState.UNREACHABLE)
    return Action(ActionKind.DRAIN if serves else ActionKind.STOP, after.target, replica.name)


def _restart(after: PoolPlan, replicas: Iterable[Replica], now_s: float) -> Iterator[Action]:
    for each in replicas:
        if each.state is ReplicaState.FAILED and now_s - each.since_s >= pause_s(each.num_failures):
            yield Action(ActionKind.RESTART, after.target, each.name)


def _start(after: PoolPlan, count: _Count, now_s: float) -> list[Action]:
    """As many new ones as are missing, with room for the old ones that still run."""
    if now_s - after.failed_start_s < pause_s(after.num_failed_starts):
        return []
    surge = after.target.rollout.max_surge if count.old else 0
    num_running = len(count.new) + len(count.old)
    missing = min(after.wanted - len(count.new), after.wanted + surge - num_running)
    return [Action(ActionKind.START, after.target)] * max(0, missing)


def _settle(after: PoolPlan, count: _Count) -> PoolPlan:
    """Once all new ones are ready and no old one runs, the servers have proven themselves."""
    is_settled = (
        not count.old
        and 0 < after.wanted == len(count.new)
        and all(each.state is ReplicaState.READY for each in count.new)
    )
    return replace(after, stable=after.target) if is_settled and after.stable != after.target else after
