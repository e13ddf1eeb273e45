from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.batching import batching_config, load_model, request
from support.clients import ClientError, HttpClient
from support.instances import Doubling, backend_of
from support.serving import running_server

from modelserver.backend import DeviceKind, Placement
from modelserver.config.resources import HostPolicy
from modelserver.errors import InvalidArgumentError
from modelserver.execution.host_policy import HostCores, on_cores
from modelserver.execution.shared_resources import SharedResources

AVAILABLE = frozenset(os.sched_getaffinity(0))
ONE = frozenset({max(AVAILABLE)})
ABSENT = max(AVAILABLE) + 1000
ON_CPU = Placement("m_0", DeviceKind.CPU, 0, 0)


def nodes(directory: Path, *lists: str) -> Path:
    for number, text in enumerate(lists):
        (directory / f"node{number}").mkdir()
        (directory / f"node{number}" / "cpulist").write_text(f"{text}\n")
    return directory


def written(cores: frozenset[int]) -> str:
    return ",".join(map(str, sorted(cores)))


def test_a_policy_is_its_cores_or_those_of_its_node(tmp_path: Path) -> None:
    found = HostCores(
        [
            HostPolicy("cores", ONE),
            HostPolicy("node", numa_node=0),
            HostPolicy("both", ONE, 0),
        ],
        nodes=nodes(tmp_path, f"{written(AVAILABLE)},{ABSENT}"),
    )
    assert found.cores_of("cores", ON_CPU) == ONE
    assert found.cores_of("node", ON_CPU) == AVAILABLE
    assert found.cores_of("both", ON_CPU) == ONE
    assert found.cores_of("", ON_CPU) is None
    assert found.cores_of("unknown", ON_CPU) is None


def test_groups_without_a_policy_have_that_of_their_device() -> None:
    found = HostCores([HostPolicy("cpu", ONE), HostPolicy("gpu_1", ONE)])
    assert found.cores_of("", ON_CPU) == ONE
    assert found.cores_of("", Placement("m_0", DeviceKind.GPU, 1, 0)) == ONE
    assert found.cores_of("", Placement("m_0", DeviceKind.GPU, 0, 0)) is None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (HostPolicy("p", frozenset({ABSENT})), f"may use the cores .*, not {ABSENT}"),
        (HostPolicy("p", numa_node=7), "has the NUMA nodes 0, 1, not 7"),
        (HostPolicy("p", numa_node=1), f"NUMA node 1 has the cores {ABSENT}, none of which remains"),
        (HostPolicy("p", ONE, 1), "none of which remains"),
    ],
)
def test_what_the_machine_does_not_have_is_named(policy: HostPolicy, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        HostCores([policy], nodes=nodes(tmp_path, written(AVAILABLE), str(ABSENT)))


def test_what_is_started_there_stays_there() -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    seen: list[frozenset[int]] = []
    with on_cores(ONE):
        thread = threading.Thread(target=lambda: seen.append(frozenset(os.sched_getaffinity(0))))
        thread.start()
        thread.join()
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert seen == [ONE]
    assert child.stdout.strip() == str(sorted(ONE))
    assert os.sched_getaffinity(0) == AVAILABLE


class Noting(Doubling):
    """Says where it was made and where it executes."""

    made: list[frozenset[int]]
    executed: list[frozenset[int]]

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self.made.append(frozenset(os.sched_getaffinity(0)))

    def run(self, inputs):  # type: ignore[no-untyped-def]
        self.executed.append(frozenset(os.sched_getaffinity(0)))
        return super().run(inputs)


async def test_instances_are_made_and_executed_on_their_cores() -> None:
    Noting.made, Noting.executed = [], []
    config = batching_config()
    group = replace(config.instance_group[0], host_policy="narrow")
    model = await asyncio.to_thread(
        load_model,
        backend_of(Noting),
        replace(config, instance_group=(group,)),
        asyncio.get_running_loop(),
        resources=SharedResources(cores=HostCores([HostPolicy("narrow", ONE)])),
    )
    try:
        await model.submit(request()).only()
    finally:
        await asyncio.to_thread(model.close)
    assert Noting.made == [ONE]
    assert Noting.executed == [ONE]


MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        if pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0]:
            os._exit(3)
        cores = np.array(sorted(os.sched_getaffinity(0)), np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", cores)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU host_policy: "narrow" } ]
"""


def test_a_child_process_stays_on_its_cores_and_so_does_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)

    def send(client: HttpClient, value: int) -> list[int]:
        cores: list[int] = client.infer("m", {"IN": np.array([value], np.int32)}).outputs["OUT"].tolist()
        return cores

    policy = f"narrow,cpu-cores={written(ONE)}"
    with running_server(tmp_path, host_policy=(policy,)) as running, HttpClient(running) as client:
        assert send(client, 0) == sorted(ONE)
        with pytest.raises(ClientError, match="exited with code 3"):
            send(client, 1)
        assert send(client, 0) == sorted(ONE)
