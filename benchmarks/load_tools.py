"""Load by h2load (gRPC) and wrk (HTTP/1.1): C programs that cost little beside the server under measurement.

Debian: `apt-get install nghttp2-client wrk`. Their answers are counted by transport status only, so each load is
first sent once and its answer checked by `check`.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.load import Load, LoadResult, summarise

_LUA = """
wrk.method = "POST"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
{headers}
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('JSON {{"count": %d, "failed": %d, "p50_us": %d, "p99_us": %d, "us": %d}}\\n',
    summary.requests, errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99), summary.duration))
end
"""


def run_tool(load: Load, port: int) -> LoadResult:
    """Run the load against 127.0.0.1:`port`. Raises SystemExit when the tool is not there or a request failed."""
    with tempfile.TemporaryDirectory() as scratch:
        result = (_h2load if load.protocol == "grpc" else _wrk)(load, port, Path(scratch))
    if result.failed or not result.count:
        raise SystemExit(f"{result.failed} requests failed, {result.count} did not: {load.protocol} {load.path}")
    return result


def check(load: Load, port: int) -> None:
    """Send the load once; raise SystemExit unless it is answered well."""
    if load.protocol == "grpc":
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]) as channel:
            channel.unary_unary(load.path)(load.body, timeout=30)
        return
    answer = httpx.post(_url(load, port), content=load.body, headers=load.headers, timeout=30)
    if answer.status_code != 200:
        raise SystemExit(f"{load.path}: {answer.status_code} {answer.text[:500]}")


def _url(load: Load, port: int) -> str:
    return f"{'https' if load.is_tls else 'http'}://127.0.0.1:{port}{load.path}"


def _h2load(load: Load, port: int, scratch: Path) -> LoadResult:
    body = scratch / "body"
    body.write_bytes(b"\0" + struct.pack(">I", len(load.body)) + load.body)
    log = scratch / "log"
    connections = load.num_connections
    seconds = max(1, round(load.seconds))
    output = _run(
        [
            *("h2load", f"-c{connections}", f"-m{load.concurrency // connections}", "-t1", f"-D{seconds}"),
            *("-d", str(body), "--log-file", str(log), "-w", "30", "-W", "30"),
            *("-H", "content-type: application/grpc", "-H", "te: trailers"),
            _url(load, port),
        ]
    )
    found = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", output)
    if found is None:
        raise SystemExit(f"h2load said nothing that is understood:\n{output[-2000:]}")
    # A line per request: start, HTTP status, microseconds.
    latencies = [int(line.split()[2]) / 1e6 for line in log.read_text().splitlines()]
    failed = int(found[2]) + int(found[3])
    return LoadResult(**{**summarise(latencies, failed, float(seconds)), "count": int(found[1])})  # type: ignore[arg-type]


def _wrk(load: Load, port: int, scratch: Path) -> LoadResult:
    body, script = scratch / "body", scratch / "load.lua"
    body.write_bytes(load.body)
    headers = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in load.headers.items())
    script.write_text(_LUA.format(body=body, headers=headers))
    seconds = max(1, round(load.seconds))
    output = _run(["wrk", f"-c{load.concurrency}", "-t1", f"-d{seconds}s", "-s", str(script), _url(load, port)])
    found = re.search(r"^JSON (.*)$", output, re.MULTILINE)
    if found is None:
        raise SystemExit(f"wrk said nothing that is understood:\n{output[-2000:]}")
    figures = json.loads(found[1])
    return LoadResult(
        figures["count"], figures["failed"], figures["us"] / 1e6, float(figures["p50_us"]), float(figures["p99_us"])
    )


def _run(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is not installed; on Debian: apt-get install nghttp2-client wrk")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
