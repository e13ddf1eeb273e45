"""On which cores of the host instances run. Threads and processes inherit the cores of the thread that starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from modelserver.backend import DeviceKind, Placement
from modelserver.config.resources import HostPolicy, parse_cores
from modelserver.errors import InvalidArgumentError

_NODES = Path("/sys/devices/system/node")

Cores = frozenset[int]


class HostCores:
    """The cores that --host-policy gives each policy's instances."""

    def __init__(self, policies: Sequence[HostPolicy] = (), *, nodes: Path = _NODES) -> None:
        """Raises InvalidArgumentError for a node or a core that this process does not have; `nodes` is Linux's list."""
        self._cores = {policy.name: _resolve(policy, nodes) for policy in policies}

    def cores_of(self, name: str, placement: Placement) -> Cores | None:
        """The cores for an instance of a group with this `host_policy`; None for all cores of the server.

        A group that names no policy has that of its device, `cpu` or `gpu_<id>`, as in Triton.
        """
        own = f"gpu_{placement.device_id}" if placement.kind is DeviceKind.GPU else "cpu"
        return self._cores.get(name or own)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._cores)


@contextmanager
def on_cores(cores: Cores | None) -> Iterator[None]:
    """Let this thread run on `cores` until the block ends, and the threads that it starts in the block for good."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _resolve(policy: HostPolicy, nodes: Path) -> Cores:
    available = frozenset(os.sched_getaffinity(0))
    wanted = available if policy.cores is None else policy.cores
    if policy.numa_node is not None:
        of_node = _cores_of_node(policy, nodes)
        wanted = of_node & available if policy.cores is None else wanted & of_node
        if not wanted:
            raise InvalidArgumentError(
                f"--host-policy={policy.name}: NUMA node {policy.numa_node} has the cores {_listed(of_node)}, none of "
                f"which remains; the server may use {_listed(available)}"
            )
    missing = wanted - available
    if missing:
        raise InvalidArgumentError(
            f"--host-policy={policy.name},cpu-cores: the server may use the cores {_listed(available)}, "
            f"not {_listed(missing)}"
        )
    return wanted


def _cores_of_node(policy: HostPolicy, nodes: Path) -> Cores:
    try:
        text = (nodes / f"node{policy.numa_node}" / "cpulist").read_text().strip()
    except OSError:
        known = sorted(path.name.removeprefix("node") for path in nodes.glob("node[0-9]*"))
        raise InvalidArgumentError(
            f"--host-policy={policy.name},numa-node: this machine has the NUMA nodes {', '.join(known) or 'of none'}, "
            f"not {policy.numa_node}"
        ) from None
    return parse_cores(text) if text else frozenset()


def _listed(cores: Cores) -> str:
    """As Linux writes it: 0-3,8."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts) or "none"
