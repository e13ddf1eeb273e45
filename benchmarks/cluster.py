"""What failures on a Ray cluster cost: `python -m benchmarks.cluster [--planner | --redis redis-server]`.

A cluster of a head and three nodes on this machine has three replicas of the model `identity` behind a router that four
clients ask all the time, 50 times a second each. Each row is an event: the requests that failed, the longest time in
which a client had no answer, and the time until all replicas were ready again. With --planner only the planner: the
time of one plan for 10,000 replicas that are replaced while some of them fail. With --redis, a redis-server program,
only the loss of the head: Ray keeps its state in that server, the head is killed with the controller on it, and
another one is started at its address after ten seconds; then a server is killed, for the controller to replace.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from modelserver.cluster.control import ControllerClient
from modelserver.cluster.deployment import Deployment, Pool, Replicas, Resources, Rollout
from modelserver.cluster.planner import ActionKind, PoolPlan, Replica, ReplicaState, plan

ROOT = Path(__file__).resolve().parent.parent
PORT, DISCOVERY_PORT = 9710, 9713
NUM_CLIENTS, PAUSE_S, PATIENCE_S = 4, 0.02, 120.0
NUM_SIMULATED = 10_000
HEAD = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
BODY = b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
POOL = Pool(
    "echo",
    str(ROOT / "model_repository" / "identity"),
    resources=Resources(cpus=0.5),
    replicas=Replicas(min=3, max=3),
)


class Client(threading.Thread):
    """Asks until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_failed = 0
        self.longest_s = 0.0
        self.is_over = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
        answered_s = time.monotonic()
        while not self.is_over.wait(PAUSE_S):
            try:
                connection.request("POST", "/v2/models/identity/infer", BODY)
                answer = connection.getresponse()
                answer.read()
                is_answered = answer.status == 200
            except (OSError, http.client.HTTPException):
                connection.close()
                is_answered = False
            now_s = time.monotonic()
            if is_answered:
                self.longest_s, answered_s = max(self.longest_s, now_s - answered_s), now_s
            else:
                self.num_failed += 1


def simulate() -> None:
    """Replace 10,000 replicas, of which one in a hundred fails each second; print the time of a plan."""
    counts = Replicas(min=NUM_SIMULATED, max=NUM_SIMULATED)
    pools = [
        Pool("p", "/m", version=version, replicas=counts, rollout=Rollout(max_surge=500, max_unavailable=500))
        for version in "12"
    ]
    current = PoolPlan.begin(pools[0])
    replicas = {f"p-{n}": Replica(f"p-{n}", pools[0].revision, ReplicaState.READY) for n in range(NUM_SIMULATED)}
    current, now_s, times_ms, chance = current.deployed(pools[1]), 1000.0, [], random.Random(1)
    while any(each.revision != pools[1].revision for each in replicas.values()):
        now_s += 1
        for name in chance.sample(sorted(replicas), NUM_SIMULATED // 100):
            if replicas[name].state is ReplicaState.READY:
                replicas[name] = replicas[name].seen(ReplicaState.FAILED, now_s)
        began = time.process_time()
        current, actions = plan(current, list(replicas.values()), None, now_s)
        times_ms.append((time.process_time() - began) * 1000)
        for action in actions:
            if action.kind is ActionKind.START:
                name = f"p-{len(replicas)}-{now_s}-{chance.random()}"
                replicas[name] = Replica(name, action.pool.revision, ReplicaState.READY, now_s, was_ready=True)
            elif action.kind is ActionKind.RESTART:
                replicas[action.replica] = replicas[action.replica].seen(ReplicaState.READY, now_s)
            else:
                del replicas[action.replica]
    print(
        f"planner: {NUM_SIMULATED} replicas replaced in {len(times_ms)} turns, "
        f"{statistics.median(times_ms):.1f} ms a plan, {max(times_ms):.1f} ms at most"
    )


class Load:
    """All clients, until their report."""

    def __init__(self) -> None:
        self._clients = [Client() for _ in range(NUM_CLIENTS)]
        for client in self._clients:
            client.start()

    def report(self, name: str, recovered_s: float | None = None) -> None:
        for client in self._clients:
            client.is_over.set()
        for client in self._clients:
            client.join()
        failed, longest_s = (
            sum(each.num_failed for each in self._clients),
            max(each.longest_s for each in self._clients),
        )
        recovered = "" if recovered_s is None else f"{recovered_s:.1f}"
        print(f"{name:<34} {failed:>8} {longest_s:>14.2f} {recovered:>14}", flush=True)


def start_router(url: str) -> subprocess.Popen[bytes]:
    words = [f"--discover={url}", f"--http-port={PORT}", f"--grpc-port={PORT + 1}", f"--metrics-port={PORT + 2}"]
    router = subprocess.Popen(
        [sys.executable, "-m", "modelserver", "route", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(8)
    print(f"{'event':<34} {'failed':>8} {'no answer, s':>14} {'recovered, s':>14}")
    return router


class Bench:
    """The cluster, with the calls of its controller."""

    def __init__(self, ray: Any, cluster: Any) -> None:
        self.cluster = cluster
        self.controller = ControllerClient(ray, creates=True)

    def deploy(self, pool: Pool) -> None:
        self.controller.call("deploy", Deployment([pool], discovery_port=DISCOVERY_PORT))
        self.settle()

    def replicas(self) -> list[dict[str, Any]]:
        return list(self.controller.call("status")["pools"][0]["replicas"])

    def settle(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.controller.call("status")["pools"][0]["settled"]:
            assert time.monotonic() < deadline_s, self.controller.call("status")
            time.sleep(0.2)

    def row(self, name: str, event: Callable[[], None], is_changed: Callable[[], bool]) -> None:
        """Have `event` happen under load; it has been seen when `is_changed`."""
        load = Load()
        time.sleep(3)
        began_s = time.monotonic()
        event()
        while not is_changed():
            time.sleep(0.2)
        self.settle()
        recovered_s = time.monotonic() - began_s
        time.sleep(2)
        load.report(name, recovered_s)

    def run(self) -> None:
        self.deploy(POOL)
        router = start_router(self.controller.call("status")["pools"][0]["discover"])
        try:
            self._rows()
        finally:
            router.terminate()
            router.wait()
            self.controller.call("leave", False)
            while self.controller.call("status")["pools"]:
                time.sleep(0.5)
            self.controller.end()

    def _rows(self) -> None:
        def gone(pid: int) -> Callable[[], bool]:
            return lambda: pid not in {each["pid"] for each in self.replicas()}

        pid = self.replicas()[0]["pid"]
        self.row("a server is killed", lambda: os.kill(pid, signal.SIGKILL), gone(pid))
        pid = self.replicas()[0]["pid"]
        self.row("a host is killed", psutil.Process(pid).parent().kill, gone(pid))
        victim = self.replicas()[0]
        (node,) = (each for each in self.cluster.worker_nodes if each.node_id.startswith(victim["node"]))
        self.row(
            "a node is killed",
            lambda: self.cluster.remove_node(node, allow_graceful=False),
            gone(victim["pid"]),
        )
        self.cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        (controller,) = (each for each in psutil.process_iter() if each.name().startswith("ray::Contr"))
        self.row("the controller is killed", controller.kill, lambda: bool(self.controller.call("status")["known"]))
        revision = self.replicas()[0]["revision"]
        changed = msgspec.structs.replace(POOL, flags=["--id=second"])
        self.row(
            "the flags change",
            lambda: self.deploy(changed),
            lambda: revision not in {each["revision"] for each in self.replicas()},
        )
        name = self.replicas()[0]["name"]
        self.row(
            "a replica is drained",
            lambda: self.controller.call("drain", name),
            lambda: name not in {each["name"] for each in self.replicas()},
        )


class HeadLoss:
    """A cluster whose head may end: all that this process asks of it is a command of its own."""

    def __init__(self, redis: str, directory: Path) -> None:
        store_port, self._port = PORT + 5, PORT + 6
        words = [redis, f"--port {store_port}", "--bind 127.0.0.1", "--save ''", f"--dir {directory}"]
        self._store = subprocess.Popen(" ".join(words), shell=True, stdout=subprocess.DEVNULL, start_new_session=True)
        os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{store_port}"
        self._file = directory / "deploy.yaml"
        document = {"discovery_port": DISCOVERY_PORT, "pools": [msgspec.to_builtins(POOL)]}
        self._file.write_bytes(msgspec.yaml.encode(document))

    def run(self) -> None:
        from ray.cluster_utils import Cluster

        time.sleep(1)  # the store starts
        head = {**HEAD, "gcs_server_port": self._port}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        router: subprocess.Popen[bytes] | None = None
        try:
            for _ in range(3):
                cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
            self._command("deploy", str(self._file), "--wait=120")
            router = start_router(self._status()["discover"])
            before = {each["pid"] for each in self._status()["replicas"]}
            load = Load()
            time.sleep(3)
            cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            time.sleep(10)
            load.report("the head is away for 10 s")
            load, began_s = Load(), time.monotonic()
            cluster.head_node = None
            cluster.add_node(**head)
            kept = self._until(lambda pool: pool["settled"], "settled")
            seconds = time.monotonic() - began_s
            load.report("another head starts", seconds)
            print(
                f"servers that were kept: {len(before & {each['pid'] for each in kept['replicas']})} of {len(before)}"
            )
            load, began_s, victim = Load(), time.monotonic(), min(before)
            os.kill(victim, signal.SIGKILL)
            self._until(
                lambda pool: pool["settled"] and victim not in {each["pid"] for each in pool["replicas"]}, "replaced"
            )
            load.report("a server is killed after that", time.monotonic() - began_s)
        finally:
            if router is not None:
                router.terminate()
                router.wait()
            cluster.shutdown()
            os.killpg(self._store.pid, signal.SIGTERM)

    def _command(self, *words: str) -> str:
        command = [sys.executable, "-m", "modelserver", *words, f"--address=127.0.0.1:{self._port}"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=150, check=True).stdout

    def _status(self) -> Any:
        (pool,) = json.loads(self._command("cluster", "status", "--json"))["pools"]
        return pool

    def _until(self, is_so: Callable[[Any], bool], what: str) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                pool = self._status()
            except subprocess.CalledProcessError:
                pool = None
            if pool is not None and is_so(pool):
                return pool
            assert time.monotonic() < deadline_s, f"the pool is not {what}: {pool}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planner", action="store_true", help="only the planner, without Ray")
    parser.add_argument("--redis", metavar="PROGRAM", help="only the loss of the head, with this redis-server")
    arguments = parser.parse_args()
    if arguments.redis:
        with tempfile.TemporaryDirectory() as directory:
            HeadLoss(arguments.redis, Path(directory)).run()
        return
    simulate()
    if arguments.planner:
        return
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        ray.init(address=cluster.address, namespace="modelserver", log_to_driver=False)
        Bench(ray, cluster).run()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
