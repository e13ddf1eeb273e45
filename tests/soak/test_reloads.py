"""Reloads without end under constant traffic: no request fails, no answer is half old and half new, nothing grows."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper
from support.clients import GrpcClient, HttpClient, ProtocolClient
from support.onnx_models import onnx_model, value
from support.serving import RunningServer, running_server
from support.traffic import traffic

NUM_RELOADS = 300
NUM_WARM = 20
NUM_POLLED = 20
NUM_ROUNDS = 3
# What pools may still have to start, ours and grpcio's: bounded, where a leak of one kind of change is 70 and more.
POOLED = 8
POOLED_BY_GRPCIO = 50
PROTOCOLS = (HttpClient, GrpcClient)

CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
"""


class CountedModel:
    """A model directory whose files add their generation to the input, twice: `a` and `b` differ in half a model."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.directory = root / name
        self.generation = 0
        self.version = 0
        # Written before the files are: what any answer may have come from.
        self.version_of: dict[int, int] = {}
        self.num_instances, self._delay_us = 1, 0
        self.directory.mkdir(parents=True)
        self.write_config()
        self.add_version()

    def add_version(self) -> None:
        """A new version directory, put in place at once."""
        self.version += 1
        made = self.directory / ".made"
        made.mkdir()
        self._write_file(made / "model.onnx")
        made.rename(self.directory / f"{self.version}")

    def replace_file(self) -> None:
        """New contents for the newest version, put in place at once."""
        made = self.directory / ".made.onnx"
        self._write_file(made)
        made.replace(self.directory / f"{self.version}" / "model.onnx")

    def remove_old_versions(self) -> None:
        for version in range(1, self.version):
            shutil.rmtree(self.directory / f"{version}", ignore_errors=True)

    def change_instances(self) -> None:
        self.num_instances = 3 - self.num_instances
        self.write_config()

    def change_delay(self) -> None:
        self._delay_us = 100 - self._delay_us
        self.write_config()

    def write_config(self) -> None:
        made = self.directory / ".made.pbtxt"
        made.write_text(CONFIG.format(delay_us=self._delay_us, count=self.num_instances))
        made.replace(self.directory / "config.pbtxt")

    def _write_file(self, path: Path) -> None:
        self.generation += 1
        self.version_of[self.generation] = self.version
        nodes = []
        for output in "ab":
            nodes.append(helper.make_node("Constant", [], [f"by_{output}"], value_float=float(self.generation)))
            nodes.append(helper.make_node("Add", ["x", f"by_{output}"], [output]))
        outputs = [value(output, ["batch", 1]) for output in "ab"]
        path.write_bytes(onnx_model([value("x", ["batch", 1])], outputs, nodes).SerializeToString())

    def ask(self, client: ProtocolClient, number: int) -> int:
        """The generation that answers. Fails unless the whole answer is from one."""
        data = np.array([[number % 100_000]], np.float32)
        answer = client.infer(self.name, {"x": data})
        (generation,) = {int((answer[output] - data).item()) for output in "ab"}
        version = self.version_of[generation]
        assert answer.model_version == str(version), f"generation {generation} is not of version {answer.model_version}"
        return generation


@dataclass(frozen=True)
class Held:
    """What this process holds that must not grow."""

    num_threads: int  # Python's
    num_system_threads: int
    num_files: int
    num_children: int

    @classmethod
    def now(cls) -> Held:
        process = psutil.Process()
        return cls(
            threading.active_count(),
            process.num_threads(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(process.children(recursive=True)),
        )

    def is_within(self, other: Held) -> bool:
        return (
            self.num_threads <= other.num_threads + POOLED
            and self.num_system_threads <= other.num_system_threads + POOLED_BY_GRPCIO
            and self.num_files <= other.num_files + POOLED
            and self.num_children <= other.num_children
        )


def _settled(server: RunningServer, least: Held | None = None) -> Held:
    """What is held once the replaced models are closed."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        held = Held.now()
        is_quiet = not any(row.state.name in ("LOADING", "UNLOADING") for row in _index(server))
        if is_quiet and (least is None or held.is_within(least)):
            break
        time.sleep(0.02)
    return held


def _index(server: RunningServer) -> list[object]:
    return server.call(server.server.repository.index)


@pytest.mark.slow
def test_explicit_reloads_under_load(tmp_path: Path) -> None:
    model = CountedModel(tmp_path, "counted")
    changes: tuple[Callable[[], None], ...] = (
        model.add_version,
        model.replace_file,
        model.change_instances,
        model.change_delay,
    )
    with (
        running_server(tmp_path, model_control_mode="explicit", load_model=("counted",)) as running,
        HttpClient(running) as http,
        GrpcClient(running) as grpc,
        traffic(running, PROTOCOLS, lambda client, number: model.ask(client, number)) as seen,
    ):
        for number in range(NUM_RELOADS):
            if number == NUM_WARM:
                warm, num_instances = _settled(running), model.num_instances
            changes[number % len(changes)]()
            if number % 10 == 0:
                model.remove_old_versions()
            control, other = (http, grpc) if number % 2 else (grpc, http)
            control.load("counted")
            assert model.ask(other, number) == model.generation, "the load was over, and an older model answered"
            assert seen.num_failed == 0, seen.failures
        assert model.num_instances == num_instances, "with other instances there are other threads"
        held = _settled(running, warm)
    seen.check()
    assert seen.num_answered > NUM_RELOADS
    assert held.is_within(warm), f"after {NUM_WARM} reloads {warm}, after {NUM_RELOADS} {held}"


@pytest.mark.slow
def test_polled_reloads_under_load(tmp_path: Path) -> None:
    models = [CountedModel(tmp_path, f"counted{number}") for number in range(NUM_POLLED)]
    with (
        running_server(tmp_path, model_control_mode="poll", repository_poll_secs=1) as running,
        HttpClient(running) as client,
        traffic(running, PROTOCOLS, lambda client, number: models[number % NUM_POLLED].ask(client, number)) as seen,
    ):
        for turn in range(NUM_ROUNDS):
            for model in models:
                model.replace_file() if turn % 2 else model.add_version()
            deadline = time.monotonic() + 30
            while any(model.ask(client, turn) != model.generation for model in models):
                assert time.monotonic() < deadline, f"in round {turn} the changes on disk were not followed"
                assert seen.num_failed == 0, seen.failures
                time.sleep(0.02)
        counts = running.call(running.server.repository.load_counts)
    seen.check()
    assert {(count.successes, count.failures) for count in counts.values()} == {(NUM_ROUNDS + 1, 0)}
