"""`modelserver serve --wire-processes=2` as a process: how it starts, what it tells, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from support.model_files import write_identity
from support.processes import ServerProcess, serving_process
from support.waiting import until_true

FRONTS = "--wire-processes=2"


def fronts(server: ServerProcess) -> list[psutil.Process]:
    return [child for child in server.children() if any(word.startswith("wire-") for word in child.cmdline())]


def infer(server: ServerProcess) -> None:
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    answer = httpx.post(f"http://{server.http_url}/v2/models/identity/infer", json=body)
    assert answer.json()["outputs"][0]["data"] == [1, 2]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_to_the_whole_group_stops_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    write_identity(tmp_path)
    # Under nohup the suite ignores SIGHUP, and so would the server.
    with serving_process(tmp_path, FRONTS, before=("env", f"--default-signal={number.name[3:]}")) as server:
        server.wait_until_started()
        infer(server)
        children = fronts(server)
        assert len(children) == 2
        for process in (*children, psutil.Process(server.process.pid)):
            process.send_signal(number)
        assert server.wait() == 0
        assert "stopped" in server.output
        assert "Traceback" not in server.output
        assert not any(child.is_running() for child in children)


def test_fronts_do_not_outlive_the_core(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with serving_process(tmp_path, FRONTS) as server:
        server.wait_until_started()
        children = fronts(server)
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


def test_the_log_tells_who_serves_and_who_died(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with serving_process(tmp_path, FRONTS) as server:
        server.wait_until_started()
        assert re.search(r"HTTP and gRPC listens on 127\.0\.0\.1:\d+, served by 2 processes", server.output)
        fronts(server)[0].kill()
        server.wait_for(r"the process of wire-\d was killed by signal SIGKILL without output; its connections are lost")
        metrics = f"http://127.0.0.1:{server.port('metrics')}/metrics"
        restarts = r'modelserver_wire_process_restarts_total\{process="wire-\d"\} 1'
        deadline_s = time.monotonic() + 20
        while not re.search(restarts, httpx.get(metrics).text):
            assert time.monotonic() < deadline_s, "the restart is not counted"
        infer(server)


def test_what_fronts_log_is_in_the_log(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with serving_process(tmp_path, FRONTS) as server:
        server.wait_until_started()
        # A client that speaks TLS to a port without it, which a front finds.
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"https://{server.http_url}/v2")
        server.wait_for(r"WARNING .*wire-\d: .*a client tries TLS on a port without it")


def test_fronts_log_as_the_core_does(tmp_path: Path) -> None:
    """Also one that is started when the level has been changed."""
    line = "logs from level DEBUG on"
    write_identity(tmp_path)
    with serving_process(tmp_path, FRONTS) as server:
        server.wait_until_started()
        answer = httpx.post(f"http://{server.http_url}/v2/logging", json={"log_verbose_level": 1})
        assert answer.json()["log_verbose_level"] == 1
        until_true(lambda: server.output.count(line) == 2, "both have followed", interval_s=0.02)
        fronts(server)[0].kill()
        until_true(lambda: server.output.count(line) == 3, "the next one has, too", interval_s=0.02)
