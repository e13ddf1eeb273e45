"""The comparisons, one function each: what is served, what it is held against, and the target."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import models, requests
from benchmarks.load import Load
from benchmarks.report import Measurement, Report, measure
from benchmarks.servers.mlserver import mlserver
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess, port_open, run_server
from modelserver.telemetry.statistics import BatchTiming, ModelStatistics

_SMALL = np.arange(16, dtype=np.float32).reshape(1, 16)
_SCRAPES = 50
_MIB = np.zeros((1, 1 << 18), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Settings:
    """A scratch folder for repositories, and how long to measure."""

    scratch: Path
    rounds: int
    seconds: float

    def repository(self, name: str) -> Path:
        """A new empty folder whose name begins so."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch))


def http_small(settings: Settings, report: Report) -> None:
    """HTTP binary identity FP32 [1,16] against a bare raw-ASGI echo."""
    repository = settings.repository("models")
    models.identity(repository, batching=False)
    load = requests.http_binary("identity", "INPUT0", _SMALL)
    with modelserver(repository) as ours, _bare("asgi_echo", "http") as bare:
        for concurrency in (1, 8, 32):
            rows = _pair(settings, "a", (ours, load), (bare, load), concurrency, "http")
            report.add(rows)
            what = f"CPU per HTTP request / bare ASGI, c{concurrency}"
            report.at_most("a", what, rows[0].cpu_us / rows[1].cpu_us, 2.0)


def grpc_small(settings: Settings, report: Report) -> None:
    """gRPC identity FP32 [1,16] against a bare grpc.aio echo."""
    repository = settings.repository("models")
    models.identity(repository, batching=False)
    load = requests.grpc_raw("identity", "INPUT0", _SMALL)
    with modelserver(repository) as ours, _bare("grpc_echo", "grpc") as bare:
        for concurrency in (1, 8, 32):
            rows = _pair(settings, "b", (ours, load), (bare, load), concurrency, "grpc")
            report.add(rows)
            what = f"CPU per gRPC request / bare grpc.aio, c{concurrency}"
            report.at_most("b", what, rows[0].cpu_us / rows[1].cpu_us, 1.5)


def http_json(settings: Settings, report: Report) -> None:
    """HTTP JSON identity FP32 [1,16] against MLServer."""
    repository = settings.repository("models")
    models.identity(repository)
    load = requests.http_json("identity", "INPUT0", _SMALL)
    with modelserver(repository) as ours, mlserver() as peer:
        for concurrency in (8, 32):
            rows = _pair(settings, "c", (ours, load), (peer, load), concurrency, "http")
            report.add(rows)
            what = f"HTTP JSON throughput / MLServer, c{concurrency}"
            report.at_least("c", what, rows[0].per_second / rows[1].per_second, 4.0)


def dynamic_batching(settings: Settings, report: Report) -> None:
    """A digits MLP that is bound by its backend, with and without dynamic batching, concurrency 64."""
    repository = settings.repository("models")
    models.wide_mlp(repository, "batched", batching=True)
    models.wide_mlp(repository, "single", batching=False)
    image = np.random.default_rng(0).random((1, 64), dtype=np.float32)
    loads = {name: requests.http_binary(name, "image", image).at(64) for name in ("batched", "single")}
    with modelserver(repository) as ours:
        servers = [(_renamed(ours, name), replace(load, seconds=settings.seconds)) for name, load in loads.items()]
        rows = measure("e", servers, rounds=settings.rounds, port="http")
        report.add(rows)
        statistics = statistics_of(ours, "batched")
    report.at_least(
        "e", "throughput with / without dynamic batching, c64", rows[0].per_second / rows[1].per_second, 3.0
    )
    mean = statistics["inference_count"] / statistics["execution_count"]
    report.at_least("e", "mean batch size with dynamic batching, c64", mean, 8.0)


def large_tensors(settings: Settings, report: Report) -> None:
    """A 1 MiB tensor there and back against the bare echoes (figures, no target)."""
    repository = settings.repository("models")
    models.identity(repository)
    http = requests.http_binary("identity", "INPUT0", _MIB)
    grpc = requests.grpc_raw("identity", "INPUT0", _MIB)
    with ExitStack() as stack:
        ours = stack.enter_context(modelserver(repository))
        asgi = stack.enter_context(_bare("asgi_echo", "http"))
        aio = stack.enter_context(_bare("grpc_echo", "grpc"))
        for concurrency in (1, 8):
            report.add(_pair(settings, "f", (ours, http), (asgi, http), concurrency, "http"))
            report.add(_pair(settings, "f", (ours, grpc), (aio, grpc), concurrency, "grpc"))


def metrics_cost(settings: Settings, report: Report) -> None:
    """What statistics and metrics cost the cheapest request there is: recording, and a scrape every 15 seconds."""
    repository = settings.repository("models")
    models.identity(repository)
    load = requests.http_binary("identity", "INPUT0", _SMALL).at(32, seconds=settings.seconds)
    with modelserver(repository) as ours:
        (row,) = measure("h", [(ours, load)], rounds=settings.rounds, port="http")
        report.add([row])
        before = ours.cpu_s()
        for _ in range(_SCRAPES):
            urllib.request.urlopen(f"http://127.0.0.1:{ours.ports['metrics']}/metrics").read()
        scrape_us = (ours.cpu_s() - before) / _SCRAPES * 1e6
        statistics = statistics_of(ours, "identity")
    mean_rows = max(1, round(statistics["inference_count"] / statistics["execution_count"]))
    share = _record_us(mean_rows) / row.cpu_us + scrape_us / 15e6
    report.at_most("h", f"metrics' share of CPU, identity c32, batches of {mean_rows}", share, 0.02)


def _record_us(rows: int) -> float:
    """CPU microseconds per request that recording a batch of `rows` requests takes; the median of several runs."""
    statistics = ModelStatistics()
    timing = BatchTiming(1000, 20_000, 3000)
    samples = []
    for _ in range(11):
        started = time.thread_time()
        for _ in range(5000):
            statistics.record_batch(rows, timing, queue_ns=[5000] * rows, request_ns=[30_000] * rows)
        samples.append((time.thread_time() - started) / 5000 / rows * 1e6)
    return float(np.median(samples))


def _pair(
    settings: Settings,
    case: str,
    ours: tuple[ServerProcess, Load],
    peer: tuple[ServerProcess, Load],
    concurrency: int,
    port: str,
) -> list[Measurement]:
    servers = [(server, load.at(concurrency, seconds=settings.seconds)) for server, load in (ours, peer)]
    return measure(case, servers, rounds=settings.rounds, port=port)


def _renamed(server: ServerProcess, name: str) -> ServerProcess:
    """The same server under another name, for two models of one server side by side."""
    return ServerProcess(name, server.process, server.ports)


def _bare(module: str, port: str) -> AbstractContextManager[ServerProcess]:
    def command(ports: Mapping[str, int]) -> Sequence[str]:
        return [sys.executable, "-m", f"benchmarks.servers.{module}", str(ports[port])]

    return run_server(module, command, ports=(port,), ready=port_open(port))


def statistics_of(server: ServerProcess, model: str) -> Mapping[str, int]:
    """The first version's row of a model's statistics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/v2/models/{model}/stats") as answer:
        rows: Mapping[str, int] = json.load(answer)["model_stats"][0]
        return rows
