"""The controller: has every pool be as it was deployed. It runs as an actor of Ray's, and requests never pass it.

What was deployed is stored; what runs is asked of the hosts, so that a controller that starts again finds both.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from modelserver.cluster.demand import RouterGauges
from modelserver.cluster.deployment import (
    DEFAULT_DISCOVERY_PORT,
    Deployment,
    Pool,
    RouterPool,
    Routers,
    changes,
    router_name,
)
from modelserver.cluster.feed import Feed, FeedEndpoint, feed_url
from modelserver.cluster.host import Report
from modelserver.cluster.planner import (
    UNREACHABLE_AFTER_S,
    Action,
    ActionKind,
    PoolPlan,
    Replica,
    ReplicaState,
    plan,
)
from modelserver.cluster.ray_cluster import Hosts, StateStore
from modelserver.errors import InvalidArgumentError, NotFoundError

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.5
_ASK_S: Final = 0.25
# As much of a node's id as people need.
_NODE_LEN: Final = 8
# Hosts that do not answer for so long after the start of a controller are taken for unreachable.
_FIRST_LOOK_S: Final = 20.0
# Feed states by those of replicas; the others are not told.
_FEED_STATES: Final = {
    ReplicaState.READY: "ready",
    # Routers find out by themselves whether they reach it.
    ReplicaState.UNREACHABLE: "ready",
    ReplicaState.DRAINING: "draining",
}


class _SavedPool(msgspec.Struct, frozen=True):
    """A plan as it is stored: without what the planner measures."""

    pool: Pool
    stable: Pool | None
    rejected: str
    held: int | None
    is_leaving: bool
    wanted: int


class _Saved(msgspec.Struct, frozen=True):
    port: int = DEFAULT_DISCOVERY_PORT
    pools: list[_SavedPool] = []
    cordoned: list[str] = []


@dataclass(slots=True)
class _Record:
    """A replica, and what its host last said. `heard_s` is None before the first report."""

    replica: Replica
    pool_name: str
    heard_s: float | None = None
    report: Report | None = None
    num_starts: int = 1


class Controller:
    """Its methods may be called from any thread. Documents are of plain types, for JSON."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store = StateStore()
        self._hosts = Hosts()
        self._saved = self._store.read()
        saved = msgspec.json.decode(self._saved, type=_Saved) if self._saved else _Saved()
        self._plans = {
            each.pool.name: PoolPlan(
                each.pool,
                stable=each.stable,
                rejected=each.rejected,
                held=each.held,
                is_leaving=each.is_leaving,
                wanted=each.wanted,
            )
            for each in saved.pools
        }
        for each in list(self._plans.values()):
            routers = each.pool.router_pool(self._discovery_url(saved.port, each.pool.name))
            if routers is not None:
                self._plans[routers.name] = replace(PoolPlan.begin(routers), is_leaving=each.is_leaving)
        self._cordoned = set(saved.cordoned)
        self._demands: dict[str, int | None] = {}
        # Pools that an operator has changed since they were last planned.
        self._unplanned: set[str] = set()
        self._started_s = time.monotonic()
        self._records = {
            name: _Record(Replica(name, "", since_s=self._started_s), name.rpartition("-")[0])
            for name in self._hosts.names
        }
        # Those that an earlier controller started, and that have not reported to this one.
        self._unknown = set(self._records)
        self._port = saved.port
        self._feed: Feed | None = None
        self._gauges = RouterGauges(self._routers)
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    # Calls.

    def deploy(self, deployment: Deployment) -> list[str]:
        """Have the cluster become so; what will happen, a sentence a pool. Raises ServerError when the port of the
        discovery cannot be had."""
        with self._lock:
            sentences = list(changes(self._deployment(), deployment))
            self._open_feed(deployment.discovery_port)
            pools = {pool.name: pool for pool in deployment.pools}
            for pool in deployment.pools:
                routers = pool.router_pool(self._discovery_url(self._port, pool.name))
                if routers is not None:
                    pools[routers.name] = routers
            self._unplanned |= self._plans.keys() | pools.keys()
            for name, pool in pools.items():
                before = self._plans.get(name)
                self._plans[name] = PoolPlan.begin(pool) if before is None else before.deployed(pool)
            for name, before in self._plans.items():
                if name not in pools:
                    self._plans[name] = replace(before, is_leaving=True)
            self._save()
            return sentences

    def preview(self, deployment: Deployment) -> list[str]:
        """What `deploy` would do."""
        with self._lock:
            return list(changes(self._deployment(), deployment))

    def scale(self, name: str, count: int | None) -> None:
        """Have `count` replicas of a pool until the next deployment; None follows the demand again."""
        with self._lock:
            before = self._plan(name)
            self._plans[name] = replace(before, held=count)
            self._unplanned.add(name)
            self._save()

    def drain(self, replica: str) -> None:
        """Replace a replica. Raises NotFoundError."""
        with self._lock:
            self._record(replica)
            self._cordoned.add(replica)
            self._save()

    def log_lines(self, replica: str, num_lines: int) -> list[str]:
        """The newest lines that a replica's server has printed."""
        with self._lock:
            self._record(replica)
        return self._hosts.log_lines(replica, num_lines)

    def leave(self, at_once: bool) -> None:
        """Drain all replicas, or kill them."""
        with self._lock:
            for name, before in self._plans.items():
                self._plans[name] = replace(before, is_leaving=True)
            self._save()
            if at_once:
                for name in list(self._records):
                    self._forget(name)

    def status(self) -> dict[str, Any]:
        """Every pool with its replicas."""
        with self._lock:
            now_s = time.monotonic()
            return {
                "known": not self._unknown,
                "pools": [self._describe(name, each, now_s) for name, each in sorted(self._plans.items())],
            }

    # The loop.

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:  # the top of the loop: the next turn may do better
                logger.exception("a turn of the controller failed")
            time.sleep(_INTERVAL_S)

    def _turn(self) -> None:
        with self._lock:
            answers = self._hosts.ask(_ASK_S)
            now_s = time.monotonic()
            for report in answers.reports:
                self._take(report, now_s)
            for name, problem in answers.lost.items():
                self._lose(name, problem, now_s)
            if self._unknown and now_s - self._started_s < _FIRST_LOOK_S:
                return  # what is not known yet must not be started twice
            self._find_unreachable(now_s)
            self._unknown.clear()
            for name in list(self._plans):
                self._follow(name, now_s)
            self._publish()
            self._save()

    def _take(self, report: Report, now_s: float) -> None:
        record = self._records.get(report.replica)
        if record is None:
            return
        if record.report is None and report.replica in self._unknown:
            record.num_starts = report.num_starts
        self._unknown.discard(report.replica)
        before = record.replica
        record.heard_s = now_s
        if report.num_starts < record.num_starts:
            return  # before the last restart
        if before.state is ReplicaState.DRAINING and report.state is not ReplicaState.STOPPED:
            return
        record.report = report
        record.replica = replace(
            before.seen(report.state, now_s, ongoing=report.ongoing, problem=report.problem),
            revision=report.pool.revision,
        )
        self._log(before, record.replica)

    def _lose(self, name: str, problem: str, now_s: float) -> None:
        record = self._records.get(name)
        if record is not None:
            self._unknown.discard(name)
            before = record.replica
            record.replica = before.seen(ReplicaState.LOST, now_s, problem=problem)
            self._log(before, record.replica)

    def _find_unreachable(self, now_s: float) -> None:
        for name, record in self._records.items():
            before = record.replica
            is_silent = record.heard_s is not None and now_s - record.heard_s > UNREACHABLE_AFTER_S
            if name in self._unknown or (is_silent and before.state is ReplicaState.READY):
                record.replica = before.seen(ReplicaState.UNREACHABLE, now_s, ongoing=before.ongoing)
                self._log(before, record.replica)

    def _follow(self, name: str, now_s: float) -> None:
        records = [each for each in self._records.values() if each.pool_name == name]
        before = self._plans[name]
        demand = self._gauges.pending(before.pool.router_urls)
        if isinstance(before.pool.routers, Routers):
            ready = [
                each.replica.ongoing
                for each in self._records.values()
                if each.pool_name == router_name(name) and each.replica.state is ReplicaState.READY
            ]
            demand = sum(ready) if ready else None
        if demand is None and before.wanted:
            demand = sum(each.replica.ongoing for each in records)
        self._demands[name] = demand
        replicas = [replace(each.replica, is_cordoned=each.replica.name in self._cordoned) for each in records]
        after, actions = plan(before, replicas, demand, now_s)
        self._plans[name] = after
        self._unplanned.discard(name)
        if after.rejected and not before.rejected:
            logger.warning("pool %s goes back to revision %s: %s", name, after.target.revision, after.rejected)
        for action in actions:
            self._act(action, now_s)
        if after.is_leaving and not any(each.pool_name == name for each in self._records.values()):
            del self._plans[name]

    def _act(self, action: Action, now_s: float) -> None:
        logger.info("%s %s", action.kind.value, action.replica or f"a replica of {action.pool.name}")
        if action.kind is ActionKind.START:
            name = f"{action.pool.name}-{secrets.token_hex(3)}"
            self._hosts.start(name, action.pool)
            self._records[name] = _Record(Replica(name, action.pool.revision, since_s=now_s), action.pool.name)
            return
        record = self._records[action.replica]
        if action.kind is ActionKind.DRAIN:
            record.replica = record.replica.seen(ReplicaState.DRAINING, now_s, ongoing=record.replica.ongoing)
            self._publish()  # routers learn of it before the server does
            self._hosts.tell(action.replica, "drain")
        elif action.kind is ActionKind.RESTART:
            record.num_starts += 1
            record.replica = record.replica.seen(ReplicaState.STARTING, now_s)
            self._hosts.tell(action.replica, "restart")
        else:
            self._forget(action.replica)

    def _forget(self, name: str) -> None:
        self._hosts.end(name)
        self._records.pop(name, None)
        self._cordoned.discard(name)
        self._unknown.discard(name)

    def _publish(self) -> None:
        if self._feed is None:
            if not self._plans:
                return
            self._open_feed(self._port)  # after a restart: where the routers know it
        assert self._feed is not None, "it was opened"
        pools: dict[str, list[FeedEndpoint]] = {name: [] for name in self._plans}
        for record in self._records.values():
            state = _FEED_STATES.get(record.replica.state)
            if state is not None and record.report is not None and record.report.address:
                host, _, port = record.report.address.rpartition(":")
                labels = {"revision": record.replica.revision, "version": record.report.pool.version}
                pools.setdefault(record.pool_name, []).append(
                    FeedEndpoint(record.replica.name, host.strip("[]"), port, state, labels)
                )
        self._feed.publish(pools)

    def _open_feed(self, port: int) -> None:
        if self._feed is not None:
            if port in (0, self._feed.port):
                return
            self._feed.close()
            self._feed = None
        self._feed = Feed(self._hosts.address, port)
        self._port = self._feed.port

    def _discovery_url(self, port: int, name: str) -> str:
        """Where routers find the replicas of a pool."""
        return f"{feed_url(self._hosts.address, port)}?pool={name}"

    def _save(self) -> None:
        """Store what was deployed, if it is not stored yet."""
        pools = [
            _SavedPool(each.pool, each.stable, each.rejected, each.held, each.is_leaving, each.wanted)
            for each in self._plans.values()
            if not isinstance(each.pool, RouterPool)  # made of the others
        ]
        content = msgspec.json.encode(_Saved(self._port, pools, sorted(self._cordoned)))
        if content != self._saved:
            self._store.write(content)
            self._saved = content

    # What is known.

    def _deployment(self) -> Deployment | None:
        every = [each.pool for each in self._plans.values() if not each.is_leaving]
        pools = [pool for pool in every if not isinstance(pool, RouterPool)]
        return Deployment(pools) if pools else None

    def _plan(self, name: str) -> PoolPlan:
        if name not in self._plans:
            known = ", ".join(sorted(self._plans)) or "none"
            raise NotFoundError(f"there is no pool '{name}'; the pools are: {known}")
        if self._plans[name].is_leaving:
            raise InvalidArgumentError(f"pool '{name}' is being stopped")
        return self._plans[name]

    def _record(self, replica: str) -> _Record:
        record = self._records.get(replica)
        if record is None:
            raise NotFoundError(f"there is no replica '{replica}': see modelserver cluster status")
        return record

    def _routers(self) -> Sequence[str]:
        return sorted({url for each in list(self._plans.values()) for url in each.pool.router_urls})

    def _describe(self, name: str, each: PoolPlan, now_s: float) -> dict[str, Any]:
        records = sorted(
            (record for record in self._records.values() if record.pool_name == name),
            key=lambda record: record.replica.name,
        )
        ready = [record for record in records if record.replica.state is ReplicaState.READY]
        new = [record for record in ready if record.replica.revision == each.target.revision]
        return {
            "name": name,
            "revision": each.target.revision,
            "version": each.target.version,
            "wanted": each.wanted,
            "held": each.held,
            "ready": len(ready),
            "demand": self._demands.get(name),
            "settled": name not in self._unplanned and not each.is_leaving and len(records) == len(new) == each.wanted,
            "leaving": each.is_leaving,
            "rejected": each.rejected,
            "problem": each.problem,
            "discover": self._discovery_url(self._feed.port, name) if self._feed is not None else "",
            "is_routed": isinstance(each.pool.routers, Routers),
            "is_of_routers": isinstance(each.pool, RouterPool),
            "replicas": [_describe(record, now_s) for record in records],
        }

    @staticmethod
    def _log(before: Replica, after: Replica) -> None:
        if before.state is not after.state:
            level = logging.WARNING if after.state in (ReplicaState.FAILED, ReplicaState.LOST) else logging.INFO
            logger.log(level, "%s is %s %s", after.name, after.state.value, after.problem)


def _describe(record: _Record, now_s: float) -> dict[str, Any]:
    replica, report = record.replica, record.report
    return {
        "name": replica.name,
        "state": replica.state.value,
        "revision": replica.revision,
        "version": report.pool.version if report is not None else "",
        "node": report.node[:_NODE_LEN] if report is not None else "",
        "address": report.address if report is not None else "",
        "pid": report.pid if report is not None else 0,
        "ongoing": replica.ongoing,
        "failures": replica.num_failures,
        "seconds": round(now_s - replica.since_s, 1),
        "problem": replica.problem,
    }
