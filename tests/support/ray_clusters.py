"""A Ray cluster of several nodes on this machine, and the commands as they are used on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support.waiting import until_true

from modelserver.cli.main import main
from modelserver.cluster.control import ControllerClient

_STORE_BYTES = 80 << 20


class RunningCluster:
    """A head that has no CPUs to give, and nodes of two CPUs each."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.address = cluster.address

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=2, object_store_memory=_STORE_BYTES)

    def kill_node_of(self, node: str) -> None:
        """End a node as a power failure does; `node` begins its id."""
        (found,) = [each for each in self.cluster.worker_nodes if each.node_id.startswith(node)]
        self.cluster.remove_node(found, allow_graceful=False)


@contextmanager
def running_cluster(num_nodes: int) -> Iterator[RunningCluster]:
    """Connected to this process until the block ends."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would report over the internet
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES},
    )
    try:
        running = RunningCluster(cluster)
        for _ in range(num_nodes):
            running.add_node()
        ray.init(address=cluster.address, namespace="modelserver", log_to_driver=False)
        yield running
    finally:
        ray.shutdown()
        cluster.shutdown()


def command(*words: str, status: int = 0) -> None:
    """Run a command in this process, which must end with `status`."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code or 0) == status


def pools_now() -> dict[str, Any]:
    """The pools by name, as `cluster status --json` prints them; Ray's own lines may come between what is printed."""
    import ray

    return {pool["name"]: pool for pool in ControllerClient(ray).call("status")["pools"]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def write_deployment(path: Path, port: int, **pools: dict[str, Any]) -> str:
    """A file with these pools by name; its path."""
    document = {"discovery_port": port, "pools": [{"name": name, **pool} for name, pool in pools.items()]}
    path.write_text(yaml.safe_dump(document))
    return str(path)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_ended(pid: int) -> None:
    until_true(lambda: not is_running(pid), f"process {pid} ends", interval_s=0.1)
