"""The wire against real Triton's C++, its identity model in C++ on the other side, and against the grpcio wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import models, requests
from benchmarks.cases import Settings
from benchmarks.load import Load
from benchmarks.load_tools import check, run_tool
from benchmarks.report import Measurement, Report, measure
from benchmarks.servers.kserve import kserve
from benchmarks.servers.litserve import litserve
from benchmarks.servers.mlserver import mlserver
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.triton import triton

_SMALL = np.arange(16, dtype=np.float32).reshape(1, 16)
_MIB = np.zeros((1, 1 << 18), dtype=np.float32)
_CONCURRENCIES = (1, 8, 32, 64)
_ATTEMPTS = 5
_INLINE = 'parameters { key: "inline_execution" value { string_value: "auto" } }'

Rows = Mapping[str, Measurement]
Servers = Callable[[ExitStack], list[ServerProcess]]


def grpc_identity(settings: Settings, report: Report) -> None:
    """gRPC identity FP32 [1,16]: in the loop and through the batching worker, against Triton C++ and grpcio."""
    load = requests.grpc_raw("identity", "INPUT0", _SMALL)

    def servers(stack: ExitStack) -> list[ServerProcess]:
        return [
            *ours_and_triton(settings, stack),
            _worker(settings, stack),
            _ours(settings, stack, "grpcio wire", "--wire=grpcio"),
        ]

    for concurrency in _CONCURRENCIES:
        rows = measure_in_turn(settings, report, "i", servers, load, concurrency, "grpc")
        ours, peer = rows["modelserver"], rows["triton"]
        at = f"gRPC identity, c{concurrency}"
        report.at_most("i", f"{at}: CPU per request in the loop / Triton C++", ours.cpu_us / peer.cpu_us, 0.6)
        worker = rows["worker"].cpu_us / peer.cpu_us
        report.at_most("i", f"{at}: CPU per request through the worker / Triton C++", worker, 0.75)
        report.at_least("i", f"{at}: throughput / Triton C++", ours.per_second / peer.per_second, 1.3)
        reference = rows["grpcio wire"].per_second
        report.at_least("i", f"{at}: throughput / grpcio wire", ours.per_second / reference, 8.0)
        if concurrency == 32:
            report.at_most("i", f"{at}: p99 / Triton C++", ours.p99_us / peer.p99_us, 1.0)


def http_identity(settings: Settings, report: Report) -> None:
    """HTTP identity FP32 [1,16], binary and JSON, against Triton C++."""
    loads = {
        "binary": requests.http_binary("identity", "INPUT0", _SMALL),
        "JSON": requests.http_json("identity", "INPUT0", _SMALL),
    }
    servers = partial(ours_and_triton, settings)
    for form, load in loads.items():
        for concurrency in _CONCURRENCIES:
            rows = measure_in_turn(settings, report, f"j {form}", servers, load, concurrency, "http")
            ours, peer = rows["modelserver"], rows["triton"]
            at = f"HTTP {form} identity, c{concurrency}"
            report.at_most("j", f"{at}: CPU per request / Triton C++", ours.cpu_us / peer.cpu_us, 0.5)
            report.at_least("j", f"{at}: throughput / Triton C++", ours.per_second / peer.per_second, 1.5)
            if concurrency == 32:
                report.at_most("j", f"{at}: p99 / Triton C++", ours.p99_us / peer.p99_us, 1.0)


def large_identity(settings: Settings, report: Report) -> None:
    """Identity of 1 MiB over HTTP, and over gRPC in frames of 16 KiB, against Triton C++."""
    http = requests.http_binary("identity", "INPUT0", _MIB)
    grpc = requests.grpc_raw("identity", "INPUT0", _MIB)
    servers = partial(ours_and_triton, settings)
    for concurrency in (1, 8):
        rows = measure_in_turn(settings, report, "k HTTP", servers, http, concurrency, "http")
        cpu_us = rows["modelserver"].cpu_us
        report.at_most("k", f"HTTP 1 MiB, c{concurrency}: CPU ms per request", cpu_us / 1000, 0.5)
        rows = measure_in_turn(settings, report, "k gRPC", servers, grpc, concurrency, "grpc")
        cpu_us = rows["modelserver"].cpu_us
        report.at_most("k", f"gRPC 1 MiB in 16 KiB frames, c{concurrency}: CPU ms per request", cpu_us / 1000, 0.8)


def digits_mlp(settings: Settings, report: Report) -> None:
    """The digits MLP on ONNX Runtime with dynamic batching, concurrency 32, against peers with the same session."""
    repository, inline = settings.repository("models"), settings.repository("inline")
    onnx = models.digits_mlp(repository)
    models.digits_mlp(inline)
    with (inline / "mlp" / "config.pbtxt").open("a") as config:
        config.write(_INLINE)
    image = np.random.default_rng(0).random((1, 8, 8), dtype=np.float32)

    def ours_and(*peers: Callable[[Path], AbstractContextManager[ServerProcess]]) -> Servers:
        return lambda stack: [
            stack.enter_context(server) for server in (modelserver(repository), *(p(onnx) for p in peers))
        ]

    binary = requests.http_binary("mlp", "image", image)
    rows = measure_in_turn(settings, report, "l binary", ours_and(kserve), binary, 32, "http")
    _at_most_us(report, "HTTP binary", rows, 44.0)
    _ahead_of(report, "HTTP binary", rows, "KServe", 16.0)
    grpc = requests.grpc_raw("mlp", "image", image)
    rows = measure_in_turn(settings, report, "l gRPC", ours_and(mlserver, kserve), grpc, 32, "grpc")
    _at_most_us(report, "gRPC", rows, 67.0)
    _ahead_of(report, "gRPC", rows, "MLServer", 12.0)
    _ahead_of(report, "gRPC", rows, "KServe", 10.0)
    json = requests.http_json("mlp", "image", image)

    def in_the_loop(_onnx: Path) -> AbstractContextManager[ServerProcess]:
        return modelserver(inline, name="in the loop")

    # MLServer with batches, as the model here forms them, and without: which costs it less is not always the same.
    batching = partial(mlserver, batches=True, name="batching mlserver")
    servers = ours_and(mlserver, batching, litserve, in_the_loop)
    rows = measure_in_turn(settings, report, "l JSON", servers, json, 32, "http")
    for peer, factor in (("batching MLServer", 22.0), ("MLServer", 22.0), ("LitServe", 32.0)):
        _ahead_of(report, "HTTP JSON", rows, peer, factor)
        _ahead_of(report, "HTTP JSON", rows, peer, factor, ours="in the loop")


def _at_most_us(report: Report, protocol: str, rows: Rows, limit_us: float) -> None:
    what = f"digits MLP over {protocol}, c32: CPU us per request"
    report.at_most("l", what, rows["modelserver"].cpu_us, limit_us)


def _ahead_of(
    report: Report, protocol: str, rows: Rows, peer: str, factor: float, *, ours: str = "modelserver"
) -> None:
    """By the factors of the table of peers and prototypes that the project began with."""
    how = "" if ours == "modelserver" else f" {ours}"
    what = f"digits MLP over {protocol}, c32: {peer}'s CPU per request / ours{how}"
    report.at_least("l", what, rows[peer.lower()].cpu_us / rows[ours].cpu_us, factor)


def ours_and_triton(settings: Settings, stack: ExitStack) -> list[ServerProcess]:
    """The identity model on our server, in the loop, and on Triton's."""
    repository = settings.repository("triton")
    models.triton_identity(repository)
    return [_ours(settings, stack, "modelserver"), stack.enter_context(triton(repository))]


def _ours(settings: Settings, stack: ExitStack, name: str, *flags: str) -> ServerProcess:
    repository = settings.repository(name)
    models.identity(repository, batching=False)
    return stack.enter_context(modelserver(repository, *flags, name=name))


def _worker(settings: Settings, stack: ExitStack) -> ServerProcess:
    repository = settings.repository("worker")
    models.identity(repository, inline=False)
    return stack.enter_context(modelserver(repository, name="worker"))


def measure_in_turn(
    settings: Settings,
    report: Report,
    case: str,
    servers: Callable[[ExitStack], list[ServerProcess]],
    load: Load,
    concurrency: int,
    port: str,
) -> Rows:
    """Start the servers, warm them, and put each under the load in turn.

    tritonserver 2.51 may die when load programs close connections with calls in flight: then all begins again.
    """
    for _ in range(_ATTEMPTS):
        with ExitStack() as stack:
            started = servers(stack)
            try:
                rows = _measure_started(settings, case, started, load, concurrency, port)
            except SystemExit:
                if all(server.process.poll() is None for server in started):
                    raise
                report.console.print(f"  {case}  a server died under c{concurrency}; measured again")
                continue
        report.add(rows)
        return {row.server: row for row in rows}
    raise SystemExit(f"{case}: servers died in each of {_ATTEMPTS} attempts")


def _measure_started(
    settings: Settings, case: str, servers: list[ServerProcess], load: Load, concurrency: int, port: str
) -> list[Measurement]:
    for server in servers:
        check(load, server.ports[port])
        run_tool(load.at(concurrency, seconds=1), server.ports[port])
    # The tools count from the first request on: the servers are warm by now.
    loads = [(server, replace(load.at(concurrency, seconds=settings.seconds), warmup_s=0.0)) for server in servers]
    return measure(case, loads, rounds=settings.rounds, port=port, run=run_tool)
