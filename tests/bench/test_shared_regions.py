"""Regions of shared memory: what is in them, what the server is told, and that they go away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelserver.bench.input_data import Step
from modelserver.bench.interface import Interface
from modelserver.bench.options import RequestOptions, SharedMemory
from modelserver.bench.shared_regions import Regions
from modelserver.bench.tensors import InputTensor
from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.errors import UnsupportedError

OUTPUTS = (TensorSpec("FIXED", Datatype.FP32, (4,)), TensorSpec("OPEN", Datatype.FP32, (-1,)))
STREAMS = tuple(
    (Step((InputTensor("A", Datatype.INT32, (1,), np.array([value], np.int32).tobytes()),)),) for value in (7, 8)
)


class NotingControl:
    """Notes regions as a server would, or refuses all from the `refuses_from`-th on."""

    def __init__(self, refuses_from: int | None = None) -> None:
        self.regions: dict[str, dict[str, Any]] = {}
        self._refuses_from = refuses_from

    def register_region(self, region: str, kind: str, details: dict[str, Any]) -> None:
        assert kind == "system"
        if self._refuses_from is not None and len(self.regions) >= self._refuses_from:
            raise UnsupportedError("shared memory is off")
        self.regions[region] = details

    def unregister_region(self, region: str, kind: str) -> None:
        del self.regions[region]


def regions(control: NotingControl, kind: SharedMemory = SharedMemory.SYSTEM) -> Regions:
    options = RequestOptions(shared_memory=kind, output_region_bytes=1000)
    return Regions(options, control, Interface("m", "1", (), OUTPUTS))  # type: ignore[arg-type]


def ours() -> set[str]:
    return {one.name for one in Path("/dev/shm").iterdir() if "modelserver_bench" in one.name}


def path(details: dict[str, Any]) -> Path:
    return Path("/dev/shm") / details["key"].removeprefix("/")


async def test_inputs_are_where_requests_say_and_everything_goes_away() -> None:
    control = NotingControl()
    async with regions(control) as made:
        placed = await made.place(STREAMS)
        tensors = [step.inputs[0] for stream in placed for step in stream]
        assert len({tensor.region_offset for tensor in tensors}) == 2
        memory = path(control.regions[tensors[0].region]).read_bytes()
        found = [memory[tensor.region_offset : tensor.region_offset + 4] for tensor in tensors]
        assert [int(np.frombuffer(raw, np.int32)[0]) for raw in found] == [7, 8]
        assert [(output.name, output.num_bytes) for output in made.outputs] == [("FIXED", 16), ("OPEN", 1000)]
        paths = [path(details) for details in control.regions.values()]
        assert len(paths) == 3
        assert all(one.exists() for one in paths)
    assert not control.regions
    assert not any(one.exists() for one in paths)


@pytest.mark.parametrize("num_taken", [0, 2])
async def test_the_words_of_a_server_that_refuses_are_passed_on(num_taken: int) -> None:
    control = NotingControl(refuses_from=num_taken)
    before = ours()
    with pytest.raises(UnsupportedError, match=r"does not take system shared memory: shared memory is off"):
        async with regions(control) as made:
            await made.place(STREAMS)
    assert not control.regions
    assert ours() <= before


async def test_without_shared_memory_nothing_happens() -> None:
    control = NotingControl()
    async with regions(control, SharedMemory.NONE) as made:
        assert await made.place(STREAMS) == STREAMS
        assert made.outputs == ()
    assert not control.regions
