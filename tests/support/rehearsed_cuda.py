"""What the steps of `tests/gpu` call of `torch.cuda`, on a machine without a GPU: nothing is asynchronous there, but
for the device of `use_fake_device`."""

from __future__ import annotations

import contextlib
import functools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support import fake_torch_cuda
from support.fake_cuda import Allocation, FakeCuda

_ALIGNMENT = 512


class Event:
    """A moment."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._has_timing = enable_timing
        self._recorded_s: float | None = None

    def record(self) -> None:
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self._has_timing, "an event of a GPU has a time only if it was asked for"
        assert end._has_timing, "an event of a GPU has a time only if it was asked for"
        assert self._recorded_s is not None, "the event was not recorded"
        assert end._recorded_s is not None, "the event was not recorded"
        return (end._recorded_s - self._recorded_s) * 1e3


def install() -> None:
    """For the rest of this process. `torch.cuda.is_available` goes on to tell the truth."""
    fakes = {
        "Event": Event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _device: SimpleNamespace(multi_processor_count=4, major=9),
        "mem_get_info": lambda _device=0: (1 << 30, 2 << 30),
        "memory_reserved": lambda: 1 << 20,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)


@functools.cache
def use_fake_device() -> None:
    """For the rest of this process, let TensorRT's `Device` find the GPU of `support.fake_torch_cuda`."""
    from modelserver_backends.tensorrt import device

    gpu = fake_torch_cuda.FakeGpu()
    gpu.__enter__()

    def on_device(made: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(made.nbytes + _ALIGNMENT, dtype=torch.uint8)
        start = -room.data_ptr() % _ALIGNMENT
        with torch._C.DisableTorchFunction():
            place = room[start : start + made.nbytes].view(made.dtype)
            place.copy_(made)
        return gpu.on_device(place)

    def empty(count: int, *, dtype: Any, device: str = "cpu", pin_memory: bool = False) -> torch.Tensor:
        made = torch.zeros(count, dtype=dtype)
        return on_device(made) if device == "cuda:0" else gpu.pinned(made) if pin_memory else made

    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        device=lambda _number: contextlib.nullcontext(),
        Stream=lambda _number, priority=0: fake_torch_cuda.Stream(gpu),
        Event=lambda *, blocking=False: fake_torch_cuda.Event(),
        CUDAGraph=lambda: fake_torch_cuda.Graph(gpu),
        graph=gpu.capture,
        stream=gpu.current,
        memory_reserved=lambda: 1 << 20,
    )
    vars(device)["_torch"] = lambda: SimpleNamespace(
        cuda=cuda,
        empty=empty,
        ones=lambda count, *, device: on_device(torch.ones(count)),
        as_tensor=torch.as_tensor,
        uint8=torch.uint8,
    )


class RehearsedClient:
    """A client that has registered its memory, in this process: `cuda` is the driver."""

    def __init__(self, data: bytes) -> None:
        self._memory = bytearray(data)
        address = np.frombuffer(self._memory, np.uint8).ctypes.data
        allocation = Allocation(address, self._memory)
        self.handle = allocation.handle
        self.cuda = FakeCuda(allocations={address: allocation})

    def read(self) -> bytes:
        return bytes(self._memory)
