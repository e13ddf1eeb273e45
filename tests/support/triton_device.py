"""A GPU for Triton on a machine without one: kernels are compiled for it, and their launches recorded, not computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

# What a block of an H100 may have; of an A100, as of 2020, 163 KiB.
_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    grid: tuple[int, int, int]
    stream: int


@dataclass
class TritonDevice:
    """`capability`: 80 for an A100, 90 for an H100. `install` makes it the device of this process."""

    capability: int
    stream: int = 7
    launches: list[Launch] = field(default_factory=list)
    # Programs that were compiled, or taken from the cache of Triton.
    num_programs: int = 0

    def install(self) -> None:
        triton.runtime.driver.set_active(self)

    # What Triton asks of a driver, and of its `utils`.
    @property
    def utils(self) -> TritonDevice:
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return self.stream

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED_BYTES[self.capability], "multiprocessor_count": 8}

    def load_binary(self, name: str, kernel: bytes, _shared: int, _device: int) -> tuple[Any, ...]:
        self.num_programs += 1
        assert kernel.startswith(b"\x7fELF"), f"{name} is not a program for a GPU"
        return object(), name, 0, 0, 1024

    def unload_module(self, _module: object) -> None: ...

    def launcher_cls(self, _source: Any, metadata: Any) -> Any:
        def launch(grid_0: int, grid_1: int, grid_2: int, stream: int, *_arguments: Any) -> None:
            self.launches.append(Launch(metadata.name, (grid_0, grid_1, grid_2), stream))

        return launch
