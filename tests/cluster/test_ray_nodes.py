"""A replica over two nodes of a Ray cluster: its ranks compute what one does, and come back when a node is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.ray_clusters import RunningCluster, command, free_port, pools_now, running_cluster, write_deployment
from support.waiting import until_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MODELS = Path(__file__).resolve().parents[2] / "model_repository"
PATIENCE = "--wait=120"


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with running_cluster(num_nodes=2) as running:
        yield running


def ask(address: str, num_tokens: int = 16) -> httpx.Response:
    body = {"model": "tiny_chat", "prompt": "The list of", "max_tokens": num_tokens, "temperature": 0}
    return httpx.post(f"http://{address}/v1/completions", json={**body, "ignore_eos": True}, timeout=60)


def replica_of(pool: str) -> Any:
    (replica,) = pools_now()[pool]["replicas"]
    return replica


def groups() -> list[str]:
    """The states of the placement groups that there are."""
    import ray

    every = [each["state"] for each in ray.util.placement_group_table().values()]
    return [state for state in every if state != "REMOVED"]


def test_two_nodes_serve_one_replica_and_a_lost_one_is_replaced(cluster: RunningCluster, tmp_path: Path) -> None:
    shutil.copytree(MODELS / "tiny_chat", tmp_path / "two" / "tiny_chat")
    with (tmp_path / "two" / "tiny_chat" / "config.pbtxt").open("a") as config:
        for name, value in {"tensor_parallel_size": 2, "num_threads": 1}.items():
            config.write(f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n')
    pools = {
        "one": {"repository": str(MODELS / "tiny_chat"), "resources": {"cpus": 1}},
        "two": {"repository": str(tmp_path / "two"), "resources": {"cpus": 1, "nodes": 2}},
    }
    command("deploy", write_deployment(tmp_path / "deploy.yaml", free_port(), **pools), PATIENCE)
    expected = ask(replica_of("one")["address"]).json()["choices"][0]["text"]
    command("deploy", write_deployment(tmp_path / "deploy.yaml", free_port(), two=pools["two"]), PATIENCE)
    first = replica_of("two")
    assert ask(first["address"]).json()["choices"][0]["text"] == expected
    assert groups() == ["CREATED"]

    # A controller that dies before it has made a replica's host leaves its nodes taken. The next one frees them.
    import ray

    ray.util.placement_group([{"CPU": 0.01}], name="replica:two-99", lifetime="detached").wait(30)
    assert groups() == ["CREATED", "CREATED"]
    (controller,) = [each for each in psutil.process_iter() if each.name().startswith("ray::Contr")]
    controller.kill()
    until_true(lambda: groups() == ["CREATED"], "what it left is free", interval_s=0.5)
    assert replica_of("two")["pid"] == first["pid"]

    def answers() -> bool:
        replica = replica_of("two")
        if replica["state"] != "ready":
            return False
        answer = ask(replica["address"])
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected

    # The node that only computes is lost: requests fail or wait, none hangs, and the same server goes on with another.
    (lost,) = [each.node_id for each in cluster.cluster.worker_nodes if not each.node_id.startswith(first["node"])]
    cluster.kill_node_of(lost)
    until_true(lambda: ask(first["address"]).status_code in (500, 503), "the loss is noticed", interval_s=0.1)
    cluster.add_node()
    until_true(answers, "it serves again", interval_s=1)
    assert replica_of("two")["pid"] == first["pid"]

    # The host of the server is lost: another replica takes its place, and its nodes are free.
    host = psutil.Process(first["pid"]).parent()
    assert host is not None
    host.kill()
    until_true(lambda: replica_of("two")["name"] != first["name"] and answers(), "it is replaced", interval_s=1)
    until_true(lambda: groups() == ["CREATED"], "the nodes of the lost one are free", interval_s=0.5)
    command("cluster", "down")
    until_true(lambda: groups() == [], "all nodes are free", interval_s=0.5)
    joined = [
        each for each in psutil.process_iter(["cmdline"]) if "join_from_afar" in " ".join(each.info["cmdline"] or [])
    ]
    assert joined == []
