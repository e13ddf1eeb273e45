"""Pools on a Ray cluster of three nodes: updates, failures and scaling under load, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.ray_clusters import (
    RunningCluster,
    command,
    free_port,
    pools_now,
    running_cluster,
    until_ended,
    write_deployment,
)
from support.rolling import Load, constant_load
from support.routing import RunningRouter, running_router
from support.waiting import until_true

from modelserver.client.server_client import ServerClient
from modelserver.cluster.serve_app import DeployedPools
from modelserver.errors import InvalidArgumentError, UnavailableError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
ECHO = {"repository": str(REPOSITORY / "identity"), "resources": {"cpus": 0.5}}
TWO = {"min": 2, "max": 2}
PATIENCE = "--wait=90"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster(num_nodes=2) as running:
        yield running


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def loaded(url: str, **options: Any) -> Iterator[tuple[RunningRouter, Load]]:
    """A router of the pool, and clients that ask it: fails when a request was lost."""
    with running_router(discover=url, **options) as router:
        until_true(lambda: router.router.replicas.is_ready, "the router has found the replicas")
        with constant_load(router.http_url, router.grpc_url, num_clients=1, pause_s=0.02) as load:
            goes_on(load)
            yield router, load
            goes_on(load)


def actors() -> list[psutil.Process]:
    """The processes of the controller and of the hosts."""
    every = psutil.process_iter(["name", "status"])
    named = [each for each in every if str(each.info["name"]).startswith(("ray::HostA", "ray::Contr"))]
    return [each for each in named if each.info["status"] != psutil.STATUS_ZOMBIE]


def goes_on(load: Load) -> None:
    before = dict(load.num_answered)
    until_true(
        lambda: (
            len(load.num_answered) == 3
            and all(load.num_answered[kind] > before.get(kind, 0) + 20 for kind in load.num_answered)
        ),
        "requests are answered",
    )


def test_flags_change_under_load_and_bad_ones_are_taken_back(
    cluster: RunningCluster, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = {"repository": str(REPOSITORY / "digits_onnx"), "resources": {"cpus": 0.5}}
    file = tmp_path / "deploy.yaml"
    command("deploy", write_deployment(file, port, echo={**ECHO, "replicas": TWO}, digits=digits), PATIENCE)
    assert "pool digits: modelserver route --discover='http://" in capsys.readouterr().out
    pools = pools_now()
    assert [pool["ready"] for pool in (pools["echo"], pools["digits"])] == [2, 1]
    assert len({replica["node"] for replica in pools["echo"]["replicas"]}) == 2
    with running_router(discover=pools["digits"]["discover"]) as router:
        until_true(lambda: router.router.replicas.is_ready, "the router has found the replica")
        assert ServerClient(f"http://{router.http_url}").model_metadata("digits_onnx")["name"] == "digits_onnx"

    before = {replica["pid"] for replica in pools["echo"]["replicas"]}
    with loaded(pools["echo"]["discover"]) as (router, load):
        good = {**ECHO, "replicas": TWO, "flags": ["--id=second"]}
        command("deploy", write_deployment(file, port, echo=good), PATIENCE)
        goes_on(load)
        assert ServerClient(f"http://{router.http_url}").server_metadata()["name"] == "second"
        bad = {**good, "flags": ["--model-control-mode=explicit", "--load-model=none", "--exit-on-error=true"]}
        command("deploy", write_deployment(file, port, echo=bad), PATIENCE, status=1)
        assert "pool echo runs its previous servers" in capsys.readouterr().err
        assert load.failures == []
        assert router.router.replicas.counts.num_lost == 0
    pools = pools_now()
    assert list(pools) == ["echo"]  # the other one was not in the file any more
    assert {each["revision"] for each in pools["echo"]["replicas"]} == {pools["echo"]["revision"]}
    assert "none" in pools["echo"]["rejected"]
    for pid in before:
        until_ended(pid)
    # By an address, from a process of its own.
    words = [sys.executable, "-m", "modelserver", "cluster", "status", f"--address={cluster.address}"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "2 of 2 ready" in shown
    assert "rolled back" in shown
    replica = pools["echo"]["replicas"][0]["name"]
    capsys.readouterr()
    command("cluster", "logs", replica)
    assert "identity" in capsys.readouterr().out
    command("cluster", "drain", replica, PATIENCE)
    command("cluster", "top")
    assert replica not in capsys.readouterr().out
    command("cluster", "logs", replica, status=1)


def test_servers_hosts_and_nodes_that_die_are_replaced(
    cluster: RunningCluster, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_deployment(tmp_path / "deploy.yaml", port, echo={**ECHO, "replicas": TWO})
    command("deploy", file, PATIENCE)
    pool = pools_now()["echo"]

    def replaced(gone: int) -> Any:
        until_ended(gone)
        until_true(lambda: is_well(gone), "there is another one", interval_s=0.5)
        return pools_now()["echo"]

    def is_well(gone: int) -> bool:
        now = pools_now()["echo"]
        return bool(now["settled"]) and gone not in {each["pid"] for each in now["replicas"]}

    with loaded(pool["discover"]) as (router, load):
        first, second = pool["replicas"]
        os.kill(first["pid"], signal.SIGKILL)
        pool = replaced(first["pid"])
        assert {each["name"] for each in pool["replicas"]} == {first["name"], second["name"]}
        goes_on(load)

        host = psutil.Process(second["pid"]).parent()
        assert host is not None
        host.kill()
        pool = replaced(second["pid"])
        assert second["name"] not in {each["name"] for each in pool["replicas"]}
        goes_on(load)

        victim, other = pool["replicas"]
        assert victim["node"] != other["node"]
        cluster.kill_node_of(victim["node"])
        pool = replaced(victim["pid"])
        goes_on(load)
        cluster.add_node()

        # The controller dies, and the next one finds what runs.
        pids = {each["pid"] for each in pool["replicas"]}
        (controller,) = [each for each in actors() if each.name().startswith("ray::Contr")]
        controller.kill()
        controller.wait(30)
        goes_on(load)
        assert {each["pid"] for each in pools_now()["echo"]["replicas"]} == pids
        lost = router.router.replicas.counts.num_lost
    # A request that a killed server had may have been processed, and is not asked again.
    assert len(load.failures) <= 3 * 3
    assert lost <= len(load.failures)


def test_routers_are_started_and_replaced_with_the_pool(
    cluster: RunningCluster, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = {f"{name}_port": free_port() for name in ("http", "grpc", "metrics")}
    routers = {"count": 2, "resources": {"cpus": 0.5}, **ports}
    echo = {**ECHO, "replicas": {"min": 0, "max": 1, "to_zero_after_s": 600}, "routers": routers}
    file = tmp_path / "deploy.yaml"
    command("deploy", write_deployment(file, port, routed=echo), PATIENCE)
    pools = pools_now()
    address = pools["routed-router"]["replicas"][0]["address"]
    assert f"pool routed-router: http://{address}" in capsys.readouterr().out
    assert address.endswith(f":{ports['http_port']}")
    assert (len({each["node"] for each in pools["routed-router"]["replicas"]}), pools["routed"]["wanted"]) == (2, 0)
    # The request waits in a router, and starts the first server.
    assert ServerClient(f"http://{address}").model_metadata("identity")["name"] == "identity"
    assert pools_now()["routed"]["ready"] == 1

    victim = pools["routed-router"]["replicas"][0]["pid"]
    os.kill(victim, signal.SIGKILL)
    until_ended(victim)
    until_true(
        lambda: (
            pools_now()["routed-router"]["ready"] == 2
            and victim not in {each["pid"] for each in pools_now()["routed-router"]["replicas"]}
        ),
        "there is another router",
        interval_s=0.5,
    )
    with constant_load(address, address, num_clients=1, pause_s=0.02) as load:
        goes_on(load)
        # Others take the ports over; no request is lost.
        routers["flags"] = ["--balance=round_robin"]
        command("deploy", write_deployment(file, port, routed=echo), PATIENCE)
        goes_on(load)
        assert load.failures == []
    command("deploy", write_deployment(file, port, routed=ECHO), PATIENCE)
    until_true(lambda: list(pools_now()) == ["routed"], "the routers end", interval_s=0.5)


def test_an_application_of_serve_is_healthy_as_its_pools_are(cluster: RunningCluster, port: int) -> None:
    pool = {"name": "echo", "replicas": {"min": 1}, **ECHO}
    application = DeployedPools({"discovery_port": port, "pools": [pool]})
    application.check_health()
    (replica,) = pools_now()["echo"]["replicas"]
    os.kill(replica["pid"], signal.SIGKILL)
    with pytest.raises(UnavailableError, match="pool echo: none of 1 replicas is ready"):
        until_true(application.check_health, "the loss is noticed")  # type: ignore[arg-type]
    until_true(lambda: pools_now()["echo"]["ready"] == 1, "it is ready again", interval_s=0.5)
    application.check_health()
    with pytest.raises(InvalidArgumentError, match=r"args: pools\[0\]"):
        DeployedPools({"pools": [{"name": "echo"}]})


def test_a_pool_goes_to_zero_and_comes_back_and_down_leaves_nothing(
    cluster: RunningCluster, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    own = free_port()
    replicas = {"min": 0, "max": 1, "downscale_delay_s": 1, "to_zero_after_s": 2}
    echo = {**ECHO, "replicas": replicas, "routers": [f"http://127.0.0.1:{own}"]}
    command("deploy", write_deployment(tmp_path / "deploy.yaml", port, echo=echo), "--wait=5")
    pool = pools_now()["echo"]
    until_true(lambda: pools_now()["echo"]["replicas"] == [], "it is at zero", interval_s=0.5)
    wait = {"wait_for_replica_secs": 60.0}
    with running_router(discover=pool["discover"], own=wait, http_port=own) as router:
        assert ServerClient(f"http://{router.http_url}").model_metadata("identity")["name"] == "identity"
        pids = [each["pid"] for each in pools_now()["echo"]["replicas"]]
        assert len(pids) == 1
        until_true(lambda: pools_now()["echo"]["replicas"] == [], "it is at zero again", interval_s=0.5)
        command("cluster", "scale", "echo", "2", PATIENCE)
        pids += [each["pid"] for each in pools_now()["echo"]["replicas"]]
        assert len(pids) == 3
    command("cluster", "down")
    for pid in pids:
        until_ended(pid)
    capsys.readouterr()
    command("cluster", "status", status=1)
    assert "nothing is deployed in this cluster" in capsys.readouterr().err
    until_true(lambda: not actors(), "the actors end", interval_s=0.5)
