"""A load that only changes batching or instances, while requests wait and execute: the same over both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clients import ProtocolClient
from support.model_files import write_identity
from support.serving import RunningServer, running_server

NUM_WAITING = 3
PATIENT = "dynamic_batching { max_queue_delay_microseconds: 600000000 }"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_identity(tmp_path / "models", "echo", more=PATIENT)
    return tmp_path / "models"


@pytest.fixture
def explicit(root: Path) -> Iterator[RunningServer]:
    with running_server(root, model_control_mode="explicit", load_model=("echo",)) as running:
        yield running


def served(running: RunningServer) -> Any:
    return running.call(lambda: running.server.repository.get("echo", None))


@pytest.mark.parametrize(
    "changed",
    [
        "dynamic_batching { }",
        "dynamic_batching { max_queue_delay_microseconds: 600000000 preferred_batch_size: [ 3 ] }",
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 } instance_group [ { count: 3 } ]",
        "dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
    ],
)
def test_what_waits_follows_the_new_rules_and_is_answered_once(
    root: Path, explicit: RunningServer, protocol: type[ProtocolClient], changed: str
) -> None:
    model = served(explicit)

    def ask(value: int) -> float:
        with protocol(explicit) as client:
            return client.infer("echo", {"INPUT0": np.full((1, 1), value, np.float32)})["OUTPUT0"].item()

    with ThreadPoolExecutor(NUM_WAITING) as pool, protocol(explicit) as client:
        answers = [pool.submit(ask, value) for value in range(NUM_WAITING)]
        while explicit.call(lambda: model.queue_depth) < NUM_WAITING:
            assert not any(answer.done() for answer in answers), "all wait"
        write_identity(root, "echo", more=changed)
        client.load("echo")
        assert [answer.result(30) for answer in answers] == list(range(NUM_WAITING))
        assert served(explicit) is model
        (statistics,) = client.statistics("echo")
        assert statistics["inference_count"] == NUM_WAITING, "the counts go on as well"
        batching = client.model_config("echo")["dynamic_batching"]
        assert ("600000000" in str(batching)) == ("600000000" in changed)


def test_a_change_that_cannot_be_followed_reloads(
    root: Path, explicit: RunningServer, protocol: type[ProtocolClient]
) -> None:
    model = served(explicit)
    write_identity(root, "echo", more="dynamic_batching { preserve_ordering: true }")
    with protocol(explicit) as client:
        client.load("echo")
        assert served(explicit) is not model
        assert client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)})["OUTPUT0"].item() == 1
