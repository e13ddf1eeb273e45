"""The backend `on_gpu`: twice its input, computed in the memory of the GPU that `support.fake_cuda` stands for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.fake_cuda import FakeCuda
from support.model_files import write_model

from modelserver.backend import Array, Backend, DeviceArray, Placement, TensorInstance

_CONFIG = """
backend: "on_gpu"
max_batch_size: 8
input [ {{ name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{more}
"""


class Machine:
    """The GPU, and what its instances were given: of each batch the type of the input, and the outputs with targets."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.batches: list[tuple[type, list[str]]] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.is_reached = threading.Event()


MACHINE = Machine()


class GpuInstance(TensorInstance):
    gpu = 0

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        raise AssertionError("the server calls run_on_device")

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> Mapping[str, Array | DeviceArray]:
        given, target = inputs["INPUT0"], targets.get("OUTPUT0")
        MACHINE.batches.append((type(given), list(targets)))
        MACHINE.is_reached.set()
        assert MACHINE.may_end.wait(60)
        values: Any = given
        if isinstance(given, DeviceArray):
            values = np.frombuffer(MACHINE.cuda.bytes_at(given.address, given.nbytes), given.dtype).reshape(given.shape)
        result = values * 2
        if target is None or result.nbytes > target.nbytes:
            return {"OUTPUT0": result}
        MACHINE.cuda.bytes_at(target.address, result.nbytes)[:] = result.tobytes()
        return {"OUTPUT0": target.beginning(result.dtype, result.shape)}


class GpuBackend(Backend):
    def create_instance(self, placement: Placement) -> GpuInstance:
        return GpuInstance()


def write_gpu_model(repository: Path, name: str, *, more: str = "") -> None:
    """`more` is text of config.pbtxt."""
    write_model(repository, name, _CONFIG.format(more=more))
