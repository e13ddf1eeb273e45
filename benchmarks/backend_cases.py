"""What the server adds to a model that computes for long: ONNX Runtime and PyTorch against bare loops of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import models, requests
from benchmarks.cases import Settings, statistics_of
from benchmarks.load import Load
from benchmarks.load_tools import check, run_tool
from benchmarks.report import Measurement, Report
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

_ROOT = Path(__file__).parent.parent
_LEAST_S = 5.0
_NUM_INSTANCES = 2


@dataclass(frozen=True, slots=True)
class _Sample:
    """Runs per second, CPU per run in microseconds, and a client's latencies, if there was one."""

    per_second: float
    cpu_us: float
    p50_us: float = float("nan")
    p99_us: float = float("nan")


def resnet(settings: Settings, report: Report) -> None:
    """A ResNet-18-sized model on ONNX Runtime and on PyTorch, one thread each, against bare loops of the libraries."""
    repository = settings.repository("models")
    models.resnet18(repository)
    models.torch_resnet18(repository)
    seconds = max(_LEAST_S, settings.seconds)
    image = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)
    with modelserver(repository) as ours:
        for kind, name, filename in (
            ("onnx", "resnet18", "model.onnx"),
            ("torch", "resnet18_torch", "model.pt2"),
        ):
            path = repository / name / "1" / filename
            load = replace(requests.http_binary(name, "image", image), seconds=seconds)
            _compare(settings, report, ours, kind=kind, path=path, load=load, names=(name, f"{name}_two"))


def _compare(
    settings: Settings,
    report: Report,
    ours: ServerProcess,
    *,
    kind: str,
    path: Path,
    load: Load,
    names: tuple[str, str],
) -> None:
    """One instance with one request behind it beside one loop; two instances beside two loops."""
    two = replace(load, path=load.path.replace(names[0], names[1]))
    for warmup in (load.at(2), two.at(2 * _NUM_INSTANCES)):
        check(warmup, ours.ports["http"])
        run_tool(replace(warmup, seconds=1), ours.ports["http"])
    pairs: list[list[_Sample]] = [[], [], [], []]
    for _ in range(settings.rounds):
        pairs[0].append(_bare(kind, path, 1, load.seconds))
        pairs[1].append(_served(ours, names[0], load.at(2)))
        pairs[2].append(_bare(kind, path, _NUM_INSTANCES, load.seconds))
        pairs[3].append(_served(ours, names[1], two.at(2 * _NUM_INSTANCES)))
    shown = (f"bare {kind} loop", names[0], f"{_NUM_INSTANCES} bare {kind} loops", names[1])
    for (server, concurrency), samples in zip(zip(shown, (1, 2, 2, 4), strict=True), pairs, strict=True):
        middle = sorted(samples, key=lambda sample: sample.per_second)[len(samples) // 2]
        report.add(
            [Measurement("d", server, concurrency, middle.per_second, middle.cpu_us, middle.p50_us, middle.p99_us)]
        )
    one_bare, one_served, two_bare, two_served = pairs
    cpu = [ours.cpu_us / bare.cpu_us for ours, bare in zip(one_served, one_bare, strict=True)]
    report.at_most("d", f"ResNet-18 CPU per request / bare {kind} loop", float(np.median(cpu)), 1.03)
    ratios = [ours.per_second / bare.per_second for ours, bare in zip(one_served, one_bare, strict=True)]
    report.at_least("d", f"ResNet-18 throughput / bare {kind} loop", float(np.median(ratios)), 0.97)
    ratios = [ours.per_second / bare.per_second for ours, bare in zip(two_served, two_bare, strict=True)]
    # The client takes from the same cores what the loops have for themselves: the CPU says what is ours.
    cpu = [ours.cpu_us / bare.cpu_us for ours, bare in zip(two_served, two_bare, strict=True)]
    what = f"ResNet-18 CPU per request, {_NUM_INSTANCES} instances / {_NUM_INSTANCES} bare {kind} loops"
    report.at_most("d", what, float(np.median(cpu)), 1.03)
    what = f"ResNet-18 throughput, {_NUM_INSTANCES} instances / {_NUM_INSTANCES} bare {kind} loops"
    report.at_least("d", what, float(np.median(ratios)), 0.97)


def _bare(kind: str, path: Path, num_loops: int, seconds: float) -> _Sample:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bare_loop", kind, str(path), str(num_loops), str(seconds)],
        capture_output=True,
        text=True,
        check=True,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result = json.loads(done.stdout.splitlines()[-1])
    return _Sample(result["runs"] / result["seconds"], result["cpu_s"] / result["runs"] * 1e6)


def _served(ours: ServerProcess, model: str, load: Load) -> _Sample:
    """CPU is divided by what the server itself counted meanwhile. wrk takes least from the cores that they share."""
    count, cpu = statistics_of(ours, model)["inference_count"], ours.cpu_s()
    result = run_tool(load, ours.ports["http"])
    cpu, count = ours.cpu_s() - cpu, statistics_of(ours, model)["inference_count"] - count
    return _Sample(result.per_second, cpu / count * 1e6, result.p50_us, result.p99_us)
