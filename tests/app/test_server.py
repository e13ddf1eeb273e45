"""The server's life as a process: start, answers, drain, force, failures; nothing is left behind."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from support.gate import BACKEND_DIRECTORY, PATIENCE_S
from support.latches import LATCHES, write_latched
from support.layouts import LAYOUTS, free_port, layout
from support.model_files import write_identity, write_model
from support.processes import ENVIRONMENT, ServerProcess, serving_process
from support.serving import running_server

from modelserver.app.shutdown import SAME_REQUEST_S
from modelserver.errors import ServerError, UnavailableError

# Of the layouts, those that end in other ways: with one process, and with several.
QUICK_LAYOUTS = ("native", "native-processes")


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in QUICK_LAYOUTS else pytest.mark.slow) for name in LAYOUTS]
)
def any_layout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each wire and layout of the ports in turn."""
    with layout(request.param):
        yield


def get(url: str, path: str, timeout_s: float = 60.0) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body.startswith((b"{", b"[")) else body.decode()
    finally:
        connection.close()


def infer_over(protocol: str, url: str, value: float) -> np.ndarray[Any, Any]:
    library = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    client = library.InferenceServerClient(url)
    try:
        tensor = library.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.full((1, 2), value, np.float32))
        answer: np.ndarray[Any, Any] = client.infer("identity", [tensor]).as_numpy("OUTPUT0")
        return answer
    finally:
        client.close()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def is_closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def ports_of(server: ServerProcess) -> list[int]:
    return [server.port(name) for name in ("HTTP", "gRPC", "metrics")]


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def test_the_example_models_are_served_and_printed(model_repository: Path) -> None:
    with serving_process(model_repository) as server:
        server.wait_until_started()
        ports = ports_of(server)
        names = {path.parent.name for path in model_repository.glob("*/config.pbtxt")}
        for name in names - {"digits_tensorrt"}:
            server.wait_for(rf"^{name} .* READY")
        server.wait_for(r"^digits_tensorrt .* loaded on demand")
        assert get(server.http_url, "/v2/health/ready")[0] == 200
        assert infer_over("http", server.http_url, 3.0).tolist() == [[3.0, 3.0]]
        assert infer_over("grpc", server.grpc_url, 4.0).tolist() == [[4.0, 4.0]]
        status, text = get(f"127.0.0.1:{ports[2]}", "/metrics")
        assert status == 200
        assert 'nv_inference_request_success{model="identity",version="1"} 2' in text
        children = server.children()
        assert children, "the Python models live in processes of their own"
        server.signal()
        assert server.wait() == 0
    assert not [child for child in children if child.is_running()]
    assert all(is_free(port) for port in ports)


@pytest.mark.usefixtures("any_layout")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_signal_lets_accepted_requests_finish(tmp_path: Path, protocol: str) -> None:
    latch = write_latched(tmp_path, held="batch")
    with serving_process(tmp_path, LATCHES) as server, ThreadPoolExecutor(3) as pool:
        server.wait_until_started()
        url = server.http_url if protocol == "http" else server.grpc_url
        metrics_url = f"127.0.0.1:{server.port('metrics')}"
        answers = [pool.submit(infer_over, protocol, url, float(value)) for value in range(3)]
        inflight = 'modelserver_inflight_requests{model="identity",version="1"} 3'
        wait_until(lambda: inflight in get(metrics_url, "/metrics")[1])
        number = {"http": signal.SIGTERM, "grpc": signal.SIGINT}[protocol]  # either means the same
        server.signal(number)
        server.wait_for(f"{number.name} received")
        # One executes and two are queued: nobody else comes in, and the metrics say what goes on.
        wait_until(lambda: is_closed(server.port("HTTP")) and is_closed(server.port("gRPC")))
        assert get(metrics_url, "/metrics")[0] == 200
        latch.open()
        assert [float(answer.result()[0, 0]) for answer in answers] == [0.0, 1.0, 2.0]
        assert server.wait() == 0


@pytest.mark.usefixtures("any_layout")
def test_a_second_signal_forces(tmp_path: Path) -> None:
    write_identity(tmp_path, execute_delay_ms=60_000)
    with serving_process(tmp_path) as server, ThreadPoolExecutor() as pool:
        server.wait_until_started()
        url, metrics_url = server.http_url, f"127.0.0.1:{server.port('metrics')}"
        answer = pool.submit(infer_over, "http", url, 1.0)
        inflight = 'modelserver_inflight_requests{model="identity",version="1"} 1'
        wait_until(lambda: inflight in get(metrics_url, "/metrics")[1])
        server.signal()
        server.wait_for("SIGTERM received")
        time.sleep(SAME_REQUEST_S + 0.05)
        server.signal()
        assert server.wait() == 1
        with pytest.raises(Exception):  # noqa: B017, PT011 - an error answer or a cut connection, both are told
            answer.result()


@pytest.mark.usefixtures("any_layout")
def test_the_drain_ends_with_the_exit_timeout(tmp_path: Path) -> None:
    write_identity(tmp_path, execute_delay_ms=60_000)
    with serving_process(tmp_path, "--exit-timeout-secs=1") as server, ThreadPoolExecutor() as pool:
        server.wait_until_started()
        metrics_url = f"127.0.0.1:{server.port('metrics')}"
        answer = pool.submit(infer_over, "http", server.http_url, 1.0)
        inflight = 'modelserver_inflight_requests{model="identity",version="1"} 1'
        wait_until(lambda: inflight in get(metrics_url, "/metrics")[1])
        server.signal()
        assert server.wait() == 1
        assert "1 requests were not answered within --exit-timeout-secs" in server.output
        assert answer.exception() is not None


def test_a_signal_while_models_load_ends_the_start(tmp_path: Path) -> None:
    latch = write_latched(tmp_path, held="load")
    with serving_process(tmp_path, LATCHES) as server:
        server.wait_for("listens")
        server.signal()
        server.wait_for("SIGTERM received")
        latch.open()
        assert server.wait() == 0
        assert "Traceback" not in server.output


def test_a_repository_without_models_is_served_with_a_warning(tmp_path: Path) -> None:
    with serving_process(tmp_path) as server:
        server.wait_for(f"no models in {tmp_path}")
        server.signal()
        assert server.wait() == 0


def test_liveness_answers_and_readiness_waits_while_models_load(tmp_path: Path) -> None:
    latch = write_latched(tmp_path, held="load")
    port = free_port()
    with serving_process(tmp_path, LATCHES, f"--http-port={port}") as server:
        url = f"127.0.0.1:{port}"
        server.wait_for("gRPC.* listens")
        assert get(url, "/v2/health/live")[0] == 200
        assert get(url, "/v2/health/ready")[0] == 400
        latch.open()
        server.wait_until_started()
        assert get(url, "/v2/health/ready")[0] == 200


@pytest.mark.parametrize(
    ("flag", "service"), [("--http-port", "HTTP"), ("--grpc-port", "GRPC"), ("--metrics-port", "Metrics")]
)
def test_a_port_that_is_taken_is_named_and_nothing_is_left(tmp_path: Path, flag: str, service: str) -> None:
    write_identity(tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with serving_process(tmp_path, f"{flag}={port}") as server:
            assert server.wait() == 1
        told = f"failed to start {service} service: Unavailable - Socket '127.0.0.1:{port}' already in use"
        assert told in server.output
        assert flag in server.output
        assert server.output.count("error:") == 1
        assert "Traceback" not in server.output


def test_a_model_that_fails_disturbs_no_other_unless_told_otherwise(tmp_path: Path) -> None:
    write_identity(tmp_path)
    write_model(tmp_path, "broken", 'backend: "nonexistent"')
    with serving_process(tmp_path, "--exit-on-error") as server:
        assert server.wait() == 1
        assert "broken" in server.output
        assert "nonexistent" in server.output
        assert "Traceback" not in server.output
    with serving_process(tmp_path) as server:
        server.wait_until_started()
        server.wait_for(r"^broken .*UNAVAILABLE .*nonexistent")
        assert get(server.http_url, "/v2/health/ready")[0] == 400
        assert get(server.http_url, "/v2/models/identity/ready")[0] == 200
        server.signal()
        assert server.wait() == 0
    with serving_process(tmp_path, "--strict-readiness=false") as server:
        server.wait_until_started()
        assert get(server.http_url, "/v2/health/ready")[0] == 200


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--http-prot=1"], 2, "did you mean '--http-port'"),
        (["--http-port=x"], 2, "--http-port expects an integer from 0 to 65535, got 'x'"),
    ],
)
def test_a_mistake_on_the_command_line_is_exit_code_2(
    tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    with serving_process(tmp_path, *arguments) as server:
        assert server.wait() == status
        assert server.output.startswith("error: ")
        assert message in server.output


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with serving_process(tmp_path / "missing") as server:
        assert server.wait() == 1
        assert f"{tmp_path / 'missing'}" in server.output
        assert "Traceback" not in server.output


def test_options_without_effect_are_said_once(tmp_path: Path) -> None:
    write_identity(tmp_path)
    flags = ("--http-thread-count=3", "--grpc-infer-thread-count=5", "--cuda-memory-pool-byte-size=0:67108864")
    with serving_process(tmp_path, *flags) as server:
        server.wait_until_started()
        server.signal()
        assert server.wait() == 0
    names = ", ".join(flag.partition("=")[0] for flag in flags)
    assert server.output.count(f"accepted, has no effect yet: {names}") == 1


def test_a_log_in_json_has_nothing_else_beside_it(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with serving_process(tmp_path, "--log-format=json") as server:
        server.wait_for("serving")
        server.signal()
        assert server.wait() == 0
    lines = [json.loads(line) for line in server.output.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_protocols_can_be_switched_off(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with running_server(tmp_path, allow_grpc=False, allow_metrics=False) as running:
        assert list(running.server.addresses) == ["HTTP"]
        assert get(running.http_url, "/v2/health/ready")[0] == 200


@pytest.mark.usefixtures("any_layout")
def test_the_metrics_port_serves_metrics_only(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with running_server(tmp_path) as running:
        assert get(running.metrics_url, "/metrics")[0] == 200
        assert get(running.metrics_url, "/v2/health/live")[0] == 404


@pytest.mark.usefixtures("any_layout")
def test_counters_begin_again_when_a_model_is_reloaded(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with running_server(tmp_path, model_control_mode="explicit", load_model=("identity",)) as running:
        infer_over("http", running.http_url, 1.0)
        success = 'nv_inference_request_success{model="identity",version="1"}'
        assert f"{success} 1" in get(running.metrics_url, "/metrics")[1]
        (tmp_path / "identity" / "1" / "changed").write_text("so that the load is not a no-op")
        with tritonclient.http.InferenceServerClient(running.http_url) as client:
            client.load_model("identity")
        text = get(running.metrics_url, "/metrics")[1]
        assert f"{success} 0" in text
        assert 'modelserver_model_loads_total{model="identity"} 2' in text


def test_a_start_that_fails_in_process_raises_and_leaves_no_port(tmp_path: Path) -> None:
    write_model(tmp_path, "broken", 'backend: "nonexistent"')
    with pytest.raises(ServerError, match="nonexistent"), running_server(tmp_path, exit_on_error=True):
        pass
    listening = {
        connection.laddr.port for connection in psutil.Process().net_connections() if connection.status == "LISTEN"
    }
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        write_identity(tmp_path)
        with pytest.raises(UnavailableError, match="--grpc-port"), running_server(tmp_path, grpc_port=port):
            pass
    after = {
        connection.laddr.port for connection in psutil.Process().net_connections() if connection.status == "LISTEN"
    }
    assert after <= listening


@pytest.mark.usefixtures("any_layout")
def test_servers_can_run_side_by_side(tmp_path: Path) -> None:
    write_identity(tmp_path)
    before = threading.active_count()
    with running_server(tmp_path) as first, running_server(tmp_path) as second:
        assert first.http_url != second.http_url
        assert infer_over("grpc", first.grpc_url, 1.0)[0, 0] == 1.0
        assert infer_over("grpc", second.grpc_url, 2.0)[0, 0] == 2.0
    wait_until(lambda: threading.active_count() <= before + 1)


def test_unknown_variables_are_a_warning_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_identity(tmp_path)
    monkeypatch.setitem(ENVIRONMENT, "MODELSERVER_ALOW_GRPC", "false")
    with serving_process(tmp_path) as server:
        server.wait_for("MODELSERVER_ALOW_GRPC is not a server option; did you mean 'MODELSERVER_ALLOW_GRPC'")
        server.wait_until_started()


def test_the_servers_bound_of_a_queue_is_named_by_its_flag(tmp_path: Path) -> None:
    """One executes, one waits, and no other may."""
    latch = write_latched(tmp_path, held="batch")
    options: dict[str, Any] = {"backend_directory": (BACKEND_DIRECTORY,), "max_queue_size": 1, "allow_metrics": False}
    with running_server(tmp_path, **options) as running, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(infer_over, "http", running.http_url, float(value)) for value in range(4)]
        refused = str(next(as_completed(answers, PATIENCE_S)).exception())
        latch.open()
    assert "already has 1 requests in its queue; send fewer at a time, or raise --max-queue-size" in refused


@pytest.mark.usefixtures("any_layout")
def test_a_grpc_message_over_the_flags_size_is_refused(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with running_server(tmp_path, grpc_max_request_size=1000) as running:
        assert infer_over("grpc", running.grpc_url, 1.0).shape == (1, 2)
        client = tritonclient.grpc.InferenceServerClient(running.grpc_url)
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 500], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 500), np.float32))
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="larger than max"):
            client.infer("identity", [tensor])
        client.close()


def test_processes_share_every_port_that_they_may(tmp_path: Path) -> None:
    write_identity(tmp_path)
    shared = {"reuse_http_port": True, "reuse_grpc_port": True}
    with running_server(tmp_path, **shared) as first:
        server = first.server
        ports = {"http_port": server.http_port, "grpc_port": server.grpc_port, "metrics_port": server.metrics_port}
        with running_server(tmp_path, **shared, **ports) as second:
            assert second.metrics_url == first.metrics_url
            assert get(second.metrics_url, "/metrics")[0] == 200


@pytest.mark.usefixtures("any_layout")
def test_verbose_logs_a_line_per_request_of_both_protocols(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with serving_process(tmp_path, "--log-verbose=1") as server:
        server.wait_until_started()
        infer_over("http", server.http_url, 1.0)
        infer_over("grpc", server.grpc_url, 1.0)
        server.signal()
        assert server.wait() == 0
        assert (
            len(re.findall(r"DEBUG .*: infer 'identity' version 1 id '.*' rows 1: ok, [\d.]+ ms", server.output)) == 2
        )


def test_settings_of_a_backend_that_is_nowhere_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_identity(tmp_path)
    with running_server(tmp_path, backend_config=("identty,x=1", "identity,y=1")):
        pass
    assert "--backend-config=identty,...: there is no backend 'identty'; did you mean identity?" in caplog.text
    assert "model 'identity': --backend-config=identity,y: has no effect" in caplog.text


def test_threads_that_compute_give_the_loop_its_turn_soon(tmp_path: Path) -> None:
    write_identity(tmp_path, "identity")
    before_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        with running_server(tmp_path):
            assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before_s)
