"""What the server adds to a model that computes for long: ONNX Runtime and PyTorch against bare loops of each.

The backends' own part is what requests cost through the server's core, in its process (`benchmarks.core_loop`). The
whole server is held to the same targets, with the image over HTTP; with one in shared memory it is shown beside.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
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
from benchmarks.shared_region import shared_region

_ROOT = Path(__file__).parent.parent
_LEAST_S = 5.0
_REGION = "image"
_HTTP = "HTTP"
_WAYS = ("shared memory", _HTTP)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Runs per second, CPU per run in microseconds, and a client's latencies, if there was one."""

    per_second: float
    cpu_us: float
    p50_us: float = float("nan")
    p99_us: float = float("nan")


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model of a library, with so many instances of one thread each, and one request behind each that executes."""

    kind: str
    repository: Path
    model: str
    filename: str
    num_instances: int

    @property
    def concurrency(self) -> int:
        return 2 * self.num_instances

    @property
    def loops(self) -> str:
        """What it is held against."""
        return f"{self.num_instances} bare {self.kind} loops" if self.num_instances > 1 else f"bare {self.kind} loop"


@dataclass(frozen=True, slots=True)
class _Round:
    """Pairs of a slice of bare loops and one of the core, and what was served in each of the ways."""

    pairs: Sequence[tuple[_Sample, _Sample]]
    served: Sequence[_Sample]

    @property
    def bare(self) -> _Sample:
        """The medians of the bare loops."""
        per_second = statistics.median(bare.per_second for bare, _ in self.pairs)
        return _Sample(per_second, statistics.median(bare.cpu_us for bare, _ in self.pairs))


def resnet(settings: Settings, report: Report) -> None:
    """A ResNet-18-sized model on ONNX Runtime and on PyTorch, one thread each, against bare loops of the libraries."""
    repository = settings.repository("models")
    models.resnet18(repository)
    models.torch_resnet18(repository)
    seconds = max(_LEAST_S, settings.seconds)
    image = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)
    with modelserver(repository, "--allow-client-shm=true") as ours, shared_region(ours, _REGION, image):
        for kind, name, filename in (("onnx", "resnet18", "model.onnx"), ("torch", "resnet18_torch", "model.pt2")):
            one = _Subject(kind, repository, name, filename, 1)
            two = replace(one, model=f"{name}_two", num_instances=2)
            _compare(settings, report, ours, (one, two), image, seconds)


def _compare(
    settings: Settings,
    report: Report,
    ours: ServerProcess,
    subjects: Sequence[_Subject],
    image: requests.Array,
    seconds: float,
) -> None:
    """Each subject beside its loops, all in turns."""
    loads = {}
    for subject in subjects:
        in_region = requests.http_shared(subject.model, "image", image, _REGION)
        in_body = requests.http_binary(subject.model, "image", image)
        loads[subject] = [load.at(subject.concurrency, seconds=seconds) for load in (in_region, in_body)]
        for load in loads[subject]:
            check(load, ours.ports["http"])
            run_tool(replace(load, seconds=1), ours.ports["http"])
    rounds: dict[_Subject, list[_Round]] = {subject: [] for subject in subjects}
    for _ in range(settings.rounds):
        for subject in subjects:
            served = [_served(ours, subject, load) for load in loads[subject]]
            rounds[subject].append(_Round(_in_core(subject, seconds), served))
    for subject in subjects:
        _report(report, subject, rounds[subject])


def _report(report: Report, subject: _Subject, rounds: Sequence[_Round]) -> None:
    pairs = [pair for one in rounds for pair in one.pairs]
    bares, cores = zip(*pairs, strict=True)
    report.add([_row(subject.loops, subject.num_instances, bares)])
    report.add([_row(f"{subject.model}, core", subject.concurrency, cores)])
    cpu, speed = _ratios(subject, "core", pairs)
    report.at_most("d", *cpu, 1.03)
    report.at_least("d", *speed, 0.97)
    for place, way in enumerate(_WAYS):
        served = [one.served[place] for one in rounds]
        report.add([_row(f"{subject.model}, {way}", subject.concurrency, served)])
        cpu, speed = _ratios(subject, way, [(one.bare, one.served[place]) for one in rounds])
        if way == _HTTP:
            report.at_most("d", *cpu, 1.03)
            report.at_least("d", *speed, 0.97)
        else:
            report.tell("d", *cpu)
            report.tell("d", *speed)


def _row(server: str, concurrency: int, samples: Sequence[_Sample]) -> Measurement:
    middle = sorted(samples, key=lambda sample: sample.per_second)[len(samples) // 2]
    return Measurement("d", server, concurrency, middle.per_second, middle.cpu_us, middle.p50_us, middle.p99_us)


def _ratios(
    subject: _Subject, way: str, pairs: Sequence[tuple[_Sample, _Sample]]
) -> tuple[tuple[str, float], tuple[str, float]]:
    """Of CPU and of throughput, the medians over pairs of bare loops and ours."""
    count = "" if subject.num_instances == 1 else f", {subject.num_instances} instances"
    cpu = statistics.median(ours.cpu_us / bare.cpu_us for bare, ours in pairs)
    speed = statistics.median(ours.per_second / bare.per_second for bare, ours in pairs)
    what = f"ResNet-18{count}, {way}"
    return (f"{what}: CPU per request / {subject.loops}", cpu), (f"{what}: throughput / {subject.loops}", speed)


def _in_core(subject: _Subject, seconds: float) -> list[tuple[_Sample, _Sample]]:
    """Slices of bare loops, each with the core's slice that followed it."""
    path = subject.repository / subject.model / "1" / subject.filename
    arguments = (subject.kind, path, subject.repository, subject.model, subject.num_instances, seconds)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.core_loop", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmarks.core_loop failed:\n{done.stderr[-2000:]}")
    pairs = json.loads(done.stdout.splitlines()[-1])
    return [(_sample(bare), _sample(core)) for bare, core in pairs]


def _sample(part: dict[str, float]) -> _Sample:
    return _Sample(part["runs"] / part["seconds"], part["cpu_s"] / part["runs"] * 1e6)


def _served(ours: ServerProcess, subject: _Subject, load: Load) -> _Sample:
    """CPU is divided by what the server itself counted meanwhile. wrk takes least from the cores that they share."""
    count, cpu = statistics_of(ours, subject.model)["inference_count"], ours.cpu_s()
    result = run_tool(load, ours.ports["http"])
    cpu, count = ours.cpu_s() - cpu, statistics_of(ours, subject.model)["inference_count"] - count
    return _Sample(result.per_second, cpu / count * 1e6, result.p50_us, result.p99_us)
