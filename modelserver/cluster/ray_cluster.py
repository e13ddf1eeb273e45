"""Ray, as far as we use it: actors by name, what they answer, and a store of a few bytes.

Ray places the hosts of replicas and says when one has ended. Requests never pass it.
"""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from modelserver.cluster.deployment import Pool
from modelserver.cluster.host import FollowerHost, ReplicaHost, Report
from modelserver.errors import UnavailableError

logger = logging.getLogger(__name__)

NAMESPACE: Final = "modelserver"
_HOST: Final = "replica:"
# The further nodes of a replica, and the placement group of all of them.
_FOLLOWER: Final = "node:"
_GROUP: Final = "replica:"
_STATE: Final = b"plans"


def import_ray() -> Any:
    """The library. Raises UnavailableError when it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"a cluster needs the Python package '{error.name}', which is not installed: "
            "install it with pip install 'modelserver-py[ray]'"
        ) from None


class StateStore:
    """A few kilobytes that outlive the controller, though not the cluster's head."""

    def __init__(self) -> None:
        self._kv = importlib.import_module("ray.experimental.internal_kv")

    def read(self) -> bytes:
        """Empty if nothing was written."""
        content = self._kv._internal_kv_get(_STATE, namespace=NAMESPACE.encode())
        return bytes(content) if content else b""

    def write(self, content: bytes) -> None:
        if content:
            self._kv._internal_kv_put(_STATE, content, overwrite=True, namespace=NAMESPACE.encode())
        else:
            self._kv._internal_kv_del(_STATE, namespace=NAMESPACE.encode())


class HostActor(ReplicaHost):
    """A host on the node where Ray put it."""

    def __init__(self, replica: str, pool: Pool, key: str = "") -> None:
        ray = import_ray()
        node = ray.get_runtime_context().get_node_id()
        super().__init__(replica, pool, host=ray.util.get_node_ip_address(), node=node, key=key)


class FollowerActor(FollowerHost):
    """A further node of the replica of the host `leader`. Ray starts it again, where its bundle is, when it dies."""

    def __init__(self, pool: Pool, node: int, leader: Any) -> None:
        super().__init__(pool, node, import_ray().get(leader.group.remote()))


@dataclass(slots=True)
class Answers:
    """What the hosts said since they were last asked. `lost` says why a host has ended."""

    reports: list[Report] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)


class Hosts:
    """The host actors by the names of their replicas. One thread."""

    def __init__(self) -> None:
        """Finds those that run already."""
        self._ray = import_ray()
        self._kind = self._ray.remote(HostActor)
        self._follower_kind = self._ray.remote(FollowerActor)
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        # The nodes where replicas are, or should come to be.
        self._nodes: dict[str, str] = {}
        for each in self._ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == NAMESPACE and each["name"].startswith(_HOST):
                try:
                    actor = self._ray.get_actor(each["name"], namespace=NAMESPACE)
                except ValueError:
                    continue  # it has ended meanwhile
                self._actors[each["name"].removeprefix(_HOST)] = actor
        for each in self._ray.util.placement_group_table().values():
            replica = each["name"].removeprefix(_GROUP)
            is_held = each["name"] != replica and each["state"] != "REMOVED"
            if is_held and replica not in self._actors:  # a controller has died before it made the host
                self.end(replica)

    @property
    def names(self) -> Sequence[str]:
        return list(self._actors)

    @property
    def address(self) -> str:
        """That of this node."""
        return str(self._ray.util.get_node_ip_address())

    def start(self, replica: str, pool: Pool) -> None:
        """Ask for a host with the pool's resources, and for further nodes; Ray places them as soon as there is room."""
        own = pool.resources
        options: dict[str, Any] = {"num_cpus": own.cpus, "num_gpus": own.gpus, "resources": dict(own.custom)}
        if own.memory_bytes:
            options["memory"] = own.memory_bytes
        strategies = self._group(replica, pool) if own.nodes > 1 else [self._strategy(replica, pool)]
        common = {"namespace": NAMESPACE, "lifetime": "detached", **options}
        leader = self._actors[replica] = self._kind.options(
            name=f"{_HOST}{replica}",
            max_restarts=0,
            max_concurrency=4,
            scheduling_strategy=strategies[0],
            **common,
        ).remote(replica, pool, secrets.token_hex(16))
        for node, strategy in enumerate(strategies[1:], 1):
            self._follower_kind.options(
                name=f"{_FOLLOWER}{replica}:{node}", max_restarts=-1, scheduling_strategy=strategy, **common
            ).remote(pool, node, leader)

    def _group(self, replica: str, pool: Pool) -> list[Any]:
        """The places of a replica's nodes, each another node of the cluster, which are taken together."""
        own = pool.resources
        needed = {"CPU": own.cpus, "GPU": own.gpus, "memory": own.memory_bytes, **own.custom}
        bundle = {name: amount for name, amount in needed.items() if amount}
        group = self._ray.util.placement_group(
            [bundle] * own.nodes, "STRICT_SPREAD", name=f"{_GROUP}{replica}", lifetime="detached"
        )
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return [strategy(group, placement_group_bundle_index=index) for index in range(own.nodes)]

    def _strategy(self, replica: str, pool: Pool) -> Any:
        """Of the nodes with room, prefer the one with the fewest replicas of the pool: Ray itself does not know which
        actors stand in for one another."""
        if pool.placement == "pack":
            return "DEFAULT"
        own = pool.resources
        needed = {"CPU": own.cpus, "GPU": own.gpus, "memory": own.memory_bytes, **own.custom}
        rooms: Mapping[str, Mapping[str, float]] = importlib.import_module(
            "ray._private.state"
        ).available_resources_per_node()
        fitting = sorted(
            node for node, room in rooms.items() if all(room.get(key, 0) >= value for key, value in needed.items())
        )
        if not fitting:
            return "SPREAD"  # it waits, and Ray's autoscaler sees it
        siblings = [node for name, node in self._nodes.items() if name.rpartition("-")[0] == pool.name]
        node = self._nodes[replica] = min(fitting, key=siblings.count)
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return affinity(node, soft=True, _spill_on_unavailable=True)

    def tell(self, replica: str, method: str) -> None:
        """Have the host do something; what becomes of it is in its reports."""
        getattr(self._actors[replica], method).remote()

    def log_lines(self, replica: str, num_lines: int) -> list[str]:
        """Raises UnavailableError when the host does not answer."""
        try:
            return list(self._ray.get(self._actors[replica].log_lines.remote(num_lines), timeout=10))
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            raise UnavailableError(f"the host of replica '{replica}' does not answer") from None

    def end(self, replica: str) -> None:
        """Kill the host, and with it what is left of its server."""
        actor = self._actors.pop(replica, None)
        self._asked.pop(replica, None)
        self._nodes.pop(replica, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)
        with suppress(ValueError):  # it has no further nodes
            group = self._ray.util.get_placement_group(f"{_GROUP}{replica}")
            for node in range(1, group.bundle_count):
                with suppress(ValueError):
                    follower = self._ray.get_actor(f"{_FOLLOWER}{replica}:{node}", namespace=NAMESPACE)
                    self._ray.kill(follower, no_restart=True)
            self._ray.util.remove_placement_group(group)

    def ask(self, timeout_s: float) -> Answers:
        """Ask every host that does not owe an answer, and return the reports that arrived in time."""
        for name, actor in self._actors.items():
            if name not in self._asked:
                self._asked[name] = actor.report.remote()
        answers = Answers()
        if not self._asked:
            return answers
        names: Mapping[Any, str] = {ref: name for name, ref in self._asked.items()}
        done, _ = self._ray.wait(list(names), num_returns=len(names), timeout=timeout_s)
        for ref in done:
            name = names[ref]
            del self._asked[name]
            try:
                report: Report = self._ray.get(ref)
                self._nodes[name] = report.node
                answers.reports.append(report)
            except self._ray.exceptions.ActorUnavailableError:
                continue  # its node does not answer now
            except self._ray.exceptions.RayActorError as error:
                answers.lost[name] = str(error).strip().splitlines()[0]
            except self._ray.exceptions.RayError as error:
                logger.warning("the host of %s cannot be asked: %s", name, error)
        return answers
