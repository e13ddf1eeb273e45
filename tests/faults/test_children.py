"""Processes of the server that are killed or stopped while they work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.asking import infer, is_ready, metric, wait_for
from support.model_files import write_identity
from support.processes import ServerProcess, serving_process
from support.python_models import write_model

SLOW_MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if value[0, 0] < 0:
                time.sleep(600)
            answer = pb_utils.Tensor("OUTPUT0", value)
            responses.append(pb_utils.InferenceResponse(output_tensors=[answer]))
        return responses
"""
CONFIG = """
max_batch_size: 1
input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    write_model(root, SLOW_MODEL, CONFIG)
    write_identity(root)
    with serving_process(root, "--wire-processes=2") as server:
        server.wait_until_started()
        yield server
        server.signal()
        assert server.wait() == 0


def model_child(server: ServerProcess) -> psutil.Process:
    fronts = {child.pid for child in fronts_of(server)}
    (child,) = [child for child in server.children() if child.pid not in fronts]
    return child


def num_restarts(server: ServerProcess, reason: str) -> float:
    url = f"127.0.0.1:{server.port('metrics')}"
    return metric(url, "modelserver_model_process_restarts_total", f'reason="{reason}"')


def fronts_of(server: ServerProcess) -> list[psutil.Process]:
    """Those that hold connections: they were started first."""
    return sorted(server.children(), key=lambda child: child.create_time())[:2]


def test_a_model_that_is_killed_at_work_fails_that_request_and_comes_back(server: ServerProcess) -> None:
    url, child = server.http_url, model_child(server)
    with ThreadPoolExecutor() as pool:
        stuck = pool.submit(infer, url, -1.0, "m")
        wait_for(
            lambda: metric(f"127.0.0.1:{server.port('metrics')}", "modelserver_inflight_requests", '"m"') == 1,
            "it works",
        )
        behind = pool.submit(infer, url, 2.0, "m")
        child.kill()
        status, text = stuck.result()
        assert status == 500
        assert "killed by signal 9" in text or "SIGKILL" in text, text
        assert behind.result() == (200, 2.0), "what waited is for the next process"
    assert infer(url, 3.0, "m") == (200, 3.0)
    assert num_restarts(server, "killed") >= 1
    assert infer(url, 4.0) == (200, 4.0)


def test_a_model_that_is_stopped_holds_up_nobody_else_and_goes_on(server: ServerProcess) -> None:
    url, child = server.http_url, model_child(server)
    with ThreadPoolExecutor() as pool:
        os.kill(child.pid, signal.SIGSTOP)
        held = pool.submit(infer, url, 5.0, "m")
        assert infer(url, 6.0) == (200, 6.0)
        assert not held.done()
        os.kill(child.pid, signal.SIGCONT)
        assert held.result() == (200, 5.0)


def test_a_stopped_model_that_is_killed_comes_back(server: ServerProcess) -> None:
    url, child = server.http_url, model_child(server)
    os.kill(child.pid, signal.SIGSTOP)
    child.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "it ended")
    wait_for(lambda: infer(url, 7.0, "m") == (200, 7.0), "it came back")
    assert is_ready(url, "m")


def test_a_killed_front_costs_its_connections_only(server: ServerProcess) -> None:
    url = server.http_url
    victim = fronts_of(server)[0]
    victim.kill()
    wait_for(lambda: not victim.is_running(), "it ended")
    for value in range(8):
        assert infer(url, float(value)) == (200, float(value))


@pytest.mark.slow
def test_a_stopped_front_is_found_and_replaced(server: ServerProcess) -> None:
    """Connections that it had are lost; new ones are answered when its silence is found."""
    url = server.http_url
    victim = fronts_of(server)[0]
    os.kill(victim.pid, signal.SIGSTOP)
    wait_for(lambda: not victim.is_running(), "it was killed", 60.0)
    for value in range(8):
        assert infer(url, float(value)) == (200, float(value))
