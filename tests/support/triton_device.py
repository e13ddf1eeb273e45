"""A GPU for Triton on a machine without one: kernels are compiled for it, and their launches recorded, not computed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

# What a program may share, as CUDA's programming guide has it: of A100, A10, L4, H100, B200, and RTX 50.
_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    grid: tuple[int, int, int]
    stream: int


@dataclass
class TritonDevice:
    """`capability`: 80 for an A100, 90 for an H100. `install` makes it the device of this process.

    Programs that need more shared memory than the device has are refused as Triton refuses them on a GPU.
    """

    capability: int
    stream: int = 7
    launches: list[Launch] = field(default_factory=list)
    # Of each program that was compiled, or taken from the cache of Triton: its name, and the bytes of a thread's values
    # for which there was no register.
    programs: list[tuple[str, int]] = field(default_factory=list)

    @property
    def shared_bytes(self) -> int:
        return _SHARED_BYTES[self.capability]

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
        return {"max_shared_mem": self.shared_bytes, "multiprocessor_count": 8}

    def load_binary(self, name: str, kernel: bytes, _shared: int, _device: int) -> tuple[Any, ...]:
        assert kernel.startswith(b"\x7fELF"), f"{name} is not a program for a GPU"
        self.programs.append((name, _stack_bytes(kernel)))
        return object(), name, 0, 0, 1024

    def unload_module(self, _module: object) -> None: ...

    def launcher_cls(self, _source: Any, metadata: Any) -> Any:
        def launch(grid_0: int, grid_1: int, grid_2: int, stream: int, *_arguments: Any) -> None:
            self.launches.append(Launch(metadata.name, (grid_0, grid_1, grid_2), stream))

        return launch


def _stack_bytes(kernel: bytes) -> int:
    with TemporaryDirectory() as place:
        path = Path(place, "kernel.cubin")
        path.write_bytes(kernel)
        shown = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"STACK:(\d+)", shown)
    assert found is not None, shown
    return int(found[1])
