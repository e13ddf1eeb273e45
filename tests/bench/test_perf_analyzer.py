"""NVIDIA's own perf_analyzer against our server, where it is found (MODELSERVER_PERF_ANALYZER or on PATH)."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.serving import RunningServer
from support.tools import run_tool

pytestmark = [pytest.mark.slow, pytest.mark.tool("perf_analyzer")]

# Any three windows agree: it gives up, with an error, where a busy machine does not come to rest.
QUICK = ("-p", "500", "-s", "999", "-r", "10")


@pytest.mark.parametrize("transport", ["http", "http async", "grpc", "grpc async", "stream"])
@pytest.mark.parametrize(
    ("model", "words"),
    [("digits_onnx", ("-b", "4")), ("identity", ("--shape", "INPUT0:16"))],
    ids=["digits", "identity"],
)
def test_it_measures_unmodified(
    server: RunningServer, tmp_path: Path, transport: str, model: str, words: tuple[str, ...]
) -> None:
    arguments = ["-m", model, *words, *QUICK, "--concurrency-range", "1:4:3", "-f", str(tmp_path / "o.csv")]
    if transport.startswith("http"):
        arguments += ["-u", server.http_url]
    else:
        arguments += ["-u", server.grpc_url, "-i", "grpc"]
    if transport == "stream":
        arguments.append("--streaming")
    if transport.endswith("async"):
        arguments.append("--async")
    output = run_tool("perf_analyzer", *arguments, timeout_s=100).decode()
    assert "Concurrency: 4, throughput: " in output
    with (tmp_path / "o.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["Concurrency"] for row in rows) == ["1", "4"]
    assert all(float(row["Inferences/Second"]) > 0 and int(row["Server Compute Infer"]) >= 0 for row in rows)
