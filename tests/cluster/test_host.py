"""A host with its server, without Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.waiting import until_true

from modelserver.client.server_client import ServerClient
from modelserver.cluster.deployment import Pool, Rollout
from modelserver.cluster.host import ReplicaHost, Report
from modelserver.cluster.planner import ReplicaState

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository" / "identity"


def reaches(host: ReplicaHost, state: ReplicaState) -> Report:
    until_true(lambda: host.report().state is state, f"the replica is {state.value}", interval_s=0.05)
    return host.report()


def test_a_server_is_started_restarted_and_drained() -> None:
    pool = Pool("p", str(REPOSITORY), flags=["--id=mine", "--drain-delay-secs=0"], env={"MODELSERVER_LOG_VERBOSE": "1"})
    host = ReplicaHost("p-1", pool, host="127.0.0.1", node="n")
    assert (host.report().state, host.report().num_starts) == (ReplicaState.STARTING, 1)
    first = reaches(host, ReplicaState.READY)
    assert ServerClient(f"http://{first.address}").server_metadata()["name"] == "mine"
    host.restart()  # it runs
    assert host.report().pid == first.pid
    os.kill(first.pid, signal.SIGKILL)
    assert "the server ended with status -9" in reaches(host, ReplicaState.FAILED).problem
    assert any("identity" in line for line in host.log_lines(100))
    host.restart()
    second = reaches(host, ReplicaState.READY)
    assert (second.num_starts, second.pid == first.pid) == (2, False)
    host.drain()
    reaches(host, ReplicaState.STOPPED)
    assert not Path(f"/proc/{second.pid}").exists()


def test_a_server_that_is_not_ready_in_time_is_killed() -> None:
    host = ReplicaHost(
        "p-1", Pool("p", str(REPOSITORY), rollout=Rollout(start_timeout_s=0)), host="127.0.0.1", node="n"
    )
    assert "the server was not ready within 0 s" in reaches(host, ReplicaState.FAILED).problem
    host.drain()
    reaches(host, ReplicaState.STOPPED)
