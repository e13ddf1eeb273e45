"""Signals at the wrong time, in numbers, and a log that nobody reads any more."""

from __future__ import annotations

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.asking import ask, infer, metric, wait_for
from support.latches import LATCHES, write_latched
from support.layouts import free_port
from support.model_files import write_identity
from support.processes import ANY_PORTS, ENVIRONMENT, SERVE, serving_process

from modelserver.app.shutdown import SAME_REQUEST_S

MOMENTS_S = [0.3, 0.9, *(pytest.param(moment_s, marks=pytest.mark.slow) for moment_s in (0.05, 0.6, 1.2))]


def test_one_request_to_stop_that_comes_many_times_at_once_is_one(tmp_path: Path) -> None:
    """To the process group, and passed on by its parent: what is in flight finishes."""
    latch = write_latched(tmp_path, held="batch")
    with serving_process(tmp_path, LATCHES) as server, ThreadPoolExecutor() as pool:
        server.wait_until_started()
        answer = pool.submit(infer, server.http_url, 1.0)
        metrics = f"127.0.0.1:{server.port('metrics')}"
        wait_for(lambda: metric(metrics, "modelserver_inflight_requests") == 1, "it executes")
        server.signal(signal.SIGSTOP)  # so that it meets all of them at one moment, however slow the machine is
        for _ in range(5):
            server.signal()
            server.signal(signal.SIGINT)
        server.signal(signal.SIGCONT)
        server.wait_for("finishing what is in flight")
        latch.open()
        assert answer.result() == (200, 1.0)
        assert server.wait() == 0


def test_two_requests_to_stop_end_it_at_once(tmp_path: Path) -> None:
    write_identity(tmp_path, execute_delay_ms=60_000)
    with serving_process(tmp_path, "--drain-delay-secs=60") as server, ThreadPoolExecutor() as pool:
        server.wait_until_started()
        answer = pool.submit(infer, server.http_url, 1.0)
        metrics = f"127.0.0.1:{server.port('metrics')}"
        wait_for(lambda: metric(metrics, "modelserver_inflight_requests") == 1, "it executes")
        server.signal()
        server.wait_for("serving for another 60 s")
        time.sleep(SAME_REQUEST_S + 0.05)
        server.signal()
        assert server.wait(20) == 1
        assert answer.exception() is not None or answer.result()[0] == 503


@pytest.mark.parametrize(
    "after_s", [0.3, 0.9, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (0.05, 0.6, 1.2))]
)
def test_a_stop_at_any_moment_of_the_start_ends_it(tmp_path: Path, after_s: float) -> None:
    """Before there are handlers the signal ends the process by itself; from then on it ends in order."""
    write_identity(tmp_path, creation_delay_sec=0.5)
    with serving_process(tmp_path) as server:
        time.sleep(after_s)
        server.signal()
        assert server.wait(30) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.output


def test_a_log_that_nobody_reads_any_more_costs_no_request(tmp_path: Path) -> None:
    """The reader of the pipe has gone, so that each write fails with EPIPE."""
    write_identity(tmp_path)
    port = free_port()
    words = [*SERVE, f"--model-repository={tmp_path}", *ANY_PORTS, f"--http-port={port}", "--log-verbose=1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        url = f"127.0.0.1:{port}"
        wait_for(lambda: is_up(url), "it serves")
        for value in range(20):
            assert infer(url, float(value)) == (200, float(value))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def is_up(url: str) -> bool:
    try:
        return ask(url, "GET", "/v2/health/ready")[0] == 200
    except OSError:
        return False
