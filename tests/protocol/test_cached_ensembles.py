"""Response caches of ensembles and of the models of their steps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.gate import BACKEND_DIRECTORY, gate_of, write_gated
from support.serving import RunningServer, running_server

CACHED = "response_cache { enable: true }"
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ {{ name: "INPUT0", data_type: TYPE_INT32, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: TYPE_INT32, dims: [ -1 ] }} ]
ensemble_scheduling {{ step [ {{
  model_name: "{step}" model_version: -1
  input_map {{ key: "INPUT0" value: "INPUT0" }} output_map {{ key: "OUTPUT0" value: "OUTPUT0" }}
}} ] }}
{more}
"""


def write_ensemble(root: Path, name: str, step: str, more: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(ENSEMBLE.format(step=step, more=more))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, layout: str) -> Path:
    directory = tmp_path_factory.mktemp(f"cached-{layout}")
    write_gated(directory, "plain")
    write_gated(directory, "cached", more=CACHED)
    write_ensemble(directory, "whole", "plain", CACHED)
    write_ensemble(directory, "parts", "cached", "")
    return directory


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[RunningServer]:
    with running_server(
        root,
        backend_directory=(BACKEND_DIRECTORY,),
        cache_config=("local,size=1000000",),
        model_control_mode="explicit",
        load_model=("*",),
    ) as server:
        yield server


@pytest.fixture
async def client(async_protocol: type[AsyncClient], running: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(running) as connected:
        yield connected


def reload(running: RunningServer, root: Path, name: str) -> None:
    """Load a model again, whose config is a little younger."""
    path = root / name / "config.pbtxt"
    path.write_text(path.read_text() + "\n# changed\n")
    os.utime(root / name / "1")
    running.call(lambda: running.server.controlplane.unload(name))
    running.call(lambda: running.server.controlplane.load(name))


@pytest.mark.parametrize(("ensemble", "step"), [("whole", "plain"), ("parts", "cached")])
async def test_an_ensemble_answers_from_a_cache_until_a_model_of_it_changes(
    client: AsyncClient, running: RunningServer, root: Path, ensemble: str, step: str
) -> None:
    gate = gate_of(step)
    await asyncio.to_thread(reload, running, root, step)
    gate.hold()
    gate.release()
    inputs = {"INPUT0": np.array([[3, 4]], np.int32)}
    for _ in range(2):
        answer = await client.infer(ensemble, inputs)
        assert answer.outputs["OUTPUT0"].tolist() == [[3, 4]]
    assert len(gate.batches) == 1
    await asyncio.to_thread(reload, running, root, step)
    answer = await client.infer(ensemble, inputs)
    assert answer.outputs["OUTPUT0"].tolist() == [[3, 4]]
    assert len(gate.batches) == 2
