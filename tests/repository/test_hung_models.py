"""Models that hang: an unload ends their processes after a grace, and says what it cannot end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.clients import ClientError, HttpClient, ProtocolClient
from support.gate import BACKEND_DIRECTORY, write_gated
from support.model_files import write_model
from support.serving import RunningServer, running_server
from support.waiting import until_true

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
# `WHERE` is where it hangs: in a loop that SIGTERM does not end, with a process of its own beside it.
SOURCE = """
import subprocess, sys, time
import triton_python_backend_utils as pb_utils

WHERE = "%s"
STARTED = %r
KEPT = []

def hang(where):
    if where == WHERE:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(STARTED, "w") as file:
            file.write(str(child.pid))
        while True:
            time.sleep(0.01)

class TritonPythonModel:
    def initialize(self, args):
        hang("initialize")

    def execute(self, requests):
        hang("execute")
        if WHERE == "stream":
            KEPT.extend(request.get_response_sender() for request in requests)
            return [None] * len(requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())])
                for request in requests]
"""
READINESS = """
    def is_ready(self):
        hang("is_ready")
        return True
"""


def _write(root: Path, where: str, config: str = "") -> Path:
    """Write a model that hangs there; returns the file with the process id of the child that it started."""
    directory = write_model(root, "hung", CONFIG + config)
    started = root.parent / "started"
    source = SOURCE % (where, str(started))
    (directory / "1" / "model.py").write_text(source + (READINESS if where == "is_ready" else ""))
    return started


def _state(client: ProtocolClient) -> tuple[str, str]:
    [row] = [row for row in client.index() if row["name"] == "hung"]
    return row.get("state", ""), row.get("reason", "")


@contextmanager
def _asking(running: RunningServer, protocol: type[ProtocolClient], count: int) -> Iterator[list[str]]:
    """That many requests in threads of their own; the errors they get, all of them once the block has ended."""
    errors: list[str] = []

    def ask() -> None:
        with protocol(running) as client:
            try:
                client.infer("hung", {"INPUT0": np.zeros(1, np.int32)})
            except ClientError as error:
                errors.append(error.message)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield errors
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a request was never answered"


def _child_pid(running: RunningServer) -> int:
    [model] = running.call(lambda: list(running.server.repository.models()))
    [info] = model.instances()
    assert info.pid is not None, "it has a process"
    return info.pid


@pytest.mark.parametrize("where", ["execute", "stream"])
def test_an_unloaded_model_that_hangs_is_killed_after_its_grace(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = _write(tmp_path / "models", where)
    with (
        running_server(
            tmp_path / "models", model_control_mode="explicit", load_model=("hung",), unload_grace_secs=1.0
        ) as running,
        HttpClient(running) as control,
    ):
        pid = _child_pid(running)
        with _asking(running, HttpClient, 3) as errors:
            if where == "execute":
                until_true(lambda: started.exists() and started.read_text() != "", "it hangs")
            [model] = running.call(lambda: list(running.server.repository.models()))
            until_true(lambda: running.call(lambda: model.inflight) == 3, "all have come")
            control.unload("hung")
            until_true(lambda: _state(control)[0] == "UNAVAILABLE", "it is closed")
        assert len(errors) == 3
        assert any("was unloaded or replaced and did not answer within 1 s and was killed" in each for each in errors)
        assert not psutil.pid_exists(pid)
        if where == "execute":
            until_true(lambda: not psutil.pid_exists(int(started.read_text())), "what it started is gone too")
        assert "--unload-grace-secs): its processes are killed" in caplog.text
        assert _state(control) == ("UNAVAILABLE", "unloaded")


def test_what_cannot_be_killed_stays_in_the_index_with_the_reason(
    protocol: type[ProtocolClient], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = write_gated(tmp_path, "hung", max_batch_size=0)
    gate.hold()
    with (
        running_server(
            tmp_path,
            model_control_mode="explicit",
            load_model=("hung",),
            backend_directory=(BACKEND_DIRECTORY,),
            unload_grace_secs=0.05,
        ) as running,
        protocol(running) as control,
    ):
        with _asking(running, protocol, 1) as errors:
            until_true(lambda: bool(gate.batches), "it executes")
            control.unload("hung")
            until_true(lambda: "cannot be killed" in _state(control)[1], "the index says why")
            state, reason = _state(control)
            assert state == "UNLOADING"
            assert reason.startswith("1 requests were not answered within 0.05 s (--unload-grace-secs)")
            assert "part of the server's process" in caplog.text
            gate.release()
        assert errors == []
        until_true(lambda: _state(control) == ("UNAVAILABLE", "unloaded"), "it was closed after its answer")


def test_an_execution_is_limited_by_the_servers_option(tmp_path: Path) -> None:
    _write(tmp_path / "models", "execute")
    with running_server(tmp_path / "models", execute_timeout_secs=1.0) as running:
        with _asking(running, HttpClient, 1) as errors:
            pass
        assert "did not answer within 1.0 s and was killed" in errors[0]


def test_the_parameter_of_a_model_goes_before_the_servers_option(tmp_path: Path) -> None:
    parameter = 'parameters { key: "EXECUTE_TIMEOUT_SECONDS" value { string_value: "1.5" } }'
    _write(tmp_path / "models", "execute", parameter)
    with running_server(tmp_path / "models", execute_timeout_secs=600.0) as running:
        with _asking(running, HttpClient, 1) as errors:
            pass
        assert "did not answer within 1.5 s and was killed" in errors[0]


def test_an_unload_ends_a_model_that_hangs_while_it_loads(tmp_path: Path) -> None:
    started = _write(tmp_path / "models", "initialize")
    with running_server(tmp_path / "models", model_control_mode="explicit") as running, HttpClient(running) as control:
        failed: list[str] = []

        def load() -> None:
            with HttpClient(running) as client:
                try:
                    client.load("hung")
                except ClientError as error:
                    failed.append(error.message)

        loading = threading.Thread(target=load)
        loading.start()
        until_true(lambda: started.exists() and started.read_text() != "", "it hangs")
        control.unload("hung")
        loading.join(60)
        assert failed, "the load failed"
        until_true(lambda: not psutil.pid_exists(int(started.read_text())), "what it started is gone")


def test_an_instance_that_hangs_is_killed_when_its_model_is_closed(tmp_path: Path) -> None:
    started = _write(tmp_path / "models", "execute")
    with running_server(tmp_path / "models") as running:
        pid = _child_pid(running)
        [model] = running.call(lambda: list(running.server.repository.models()))
        with _asking(running, HttpClient, 1) as errors:
            until_true(lambda: started.exists() and started.read_text() != "", "it hangs")
            model.close(0.1)
        assert "was closed while it executed and was killed" in errors[0]
        until_true(lambda: not psutil.pid_exists(pid), "its process is gone")
