"""A clock that jumps, as when NTP corrects it or a machine is restored. Only people's dates come from it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.asking import infer, metric, wait_for
from support.model_files import write_identity
from support.processes import ANY_PORTS, ServerProcess

SOURCES = Path(__file__).parents[2] / "modelserver"
# Ages of files and when they were read, the date in what is signed for object stores, and the creation time that
# OpenAI's and Ollama's APIs tell.
READERS_OF_THE_WALL_CLOCK = {
    "auth/api_keys.py",  # the day on which a key expires
    "repository/cloud_cache.py",
    "store/blobs.py",
    "store/transport.py",  # the time that a registry wants in what is signed
    "repository/definition.py",
    "frontends/llm/edge.py",
    "frontends/ollama/answers.py",
    "frontends/openai/batches/service.py",  # the hour at which a batch ends that a restart may lie before
    "frontends/openai/routes.py",
}
# What people look at: nothing waits for it.
FOR_PEOPLE = ("cli/", "bench/", "toolkit/", "telemetry/", "frontends/http/documents.py")


def test_nothing_that_waits_or_expires_looks_at_the_wall_clock() -> None:
    reads = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(utc)?now\b")
    readers = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if reads.search(path.read_text())}
    assert {name for name in readers if not name.startswith(FOR_PEOPLE)} <= READERS_OF_THE_WALL_CLOCK


# The command line, with a wall clock that is read from a file's hours beside the right time.
JUMPING = """
import sys, time
def jumping(read, unit):
    def clock():
        with open({path!r}) as file:
            return read() + int(file.read()) * 3600 * unit
    return clock
time.time, time.time_ns = jumping(time.time, 1), jumping(time.time_ns, 10**9)
from modelserver.cli.main import main
main()
"""


@pytest.mark.parametrize("hours", ["1", pytest.param("-1", marks=pytest.mark.slow)])
def test_requests_are_answered_while_the_clock_jumps(tmp_path: Path, hours: str) -> None:
    """Queue delays, deadlines, sweeps of connections, polls of the repository go on."""
    offset = tmp_path / "hours"
    offset.write_text("0")
    write_identity(
        tmp_path / "models", max_batch_size=8, more="dynamic_batching { max_queue_delay_microseconds: 20000 }"
    )
    command = (sys.executable, "-c", JUMPING.format(path=str(offset)), "serve")
    flags = [f"--model-repository={tmp_path / 'models'}", "--model-control-mode=poll", "--repository-poll-secs=1"]
    server = ServerProcess([*flags, *ANY_PORTS], command=command)
    try:
        server.wait_until_started()
        url = server.http_url
        assert infer(url, 1.0) == (200, 1.0)
        offset.write_text(hours)
        for value in range(10):
            assert infer(url, float(value)) == (200, float(value))
        write_identity(tmp_path / "models", "late")
        wait_for(lambda: infer(url, 2.0, "late") == (200, 2.0), "the poller found the new model")
        queued_us = metric(f"127.0.0.1:{server.port('metrics')}", "nv_inference_queue_duration_us", '"identity"')
        assert 0 <= queued_us < 60e6, "no wait lasted as long as the jump"
        server.signal()
        assert server.wait() == 0
    finally:
        server.close()
