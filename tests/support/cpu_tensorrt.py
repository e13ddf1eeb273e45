"""A stand-in for TensorRT and CUDA that computes on the CPU, and insists on the order of calls that TensorRT wants.
Nothing is computed or copied before its stream is waited for.

It shows that our side of the conversation is right in itself, and nothing about TensorRT: `tests/gpu` is for that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from modelserver_backends.tensorrt.device import Device
from modelserver_backends.tensorrt.engine import LoadedEngine
from modelserver_backends.tensorrt.engine_info import EngineInfo
from support.fake_torch_cuda import Event, FakeGpu, Graph, Stream

from modelserver.backend import DeviceArray

Array = np.ndarray[Any, Any]
Compute = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class CpuDevice(Device):
    """Memory of the host, and streams whose work is done when they are waited for."""

    def __init__(self) -> None:
        self.device_id = 0
        self.name = "cuda:9"  # its budget is that of a device, and nobody else's
        self.num_free_bytes = 1 << 30
        self.gpu = FakeGpu()
        cuda = SimpleNamespace(
            stream=self.gpu.current,
            CUDAGraph=lambda: Graph(self.gpu),
            graph=self.gpu.capture,
            OutOfMemoryError=torch.cuda.OutOfMemoryError,
        )
        self.torch = SimpleNamespace(cuda=cuda)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with self.gpu:
            yield

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        return Stream(self.gpu)

    def new_event(self, *, busy_waits: bool = False) -> Event:
        return Event()

    def free_bytes(self) -> int:
        return self.num_free_bytes

    def empty(self, num_bytes: int) -> Any:
        return self.gpu.on_device(torch.zeros(max(1, num_bytes), dtype=torch.uint8))

    def borrow(self, array: DeviceArray) -> Any:
        return self.gpu.borrowed(array.beginning(np.dtype(np.uint8), (array.nbytes,)))

    def pinned(self, num_bytes: int, *, is_pinned: bool = True) -> Any:
        made = torch.zeros(max(1, num_bytes), dtype=torch.uint8)
        return self.gpu.pinned(made) if is_pinned else made


class Context:
    """One execution context: every call in the order that TensorRT's documentation asks for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._outputs: dict[str, tuple[int, ...]] | None = None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert not self._shapes, "the profile comes before any shape"
        self._profile = profile
        return profile < len(self._engine.info.profiles)

    def set_device_memory(self, address: int, size: int) -> None:
        assert address
        assert size == self._engine.device_memory_size_v2

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None, "the profile comes before any shape"
        self._outputs = None
        self._shapes[name] = tuple(shape)
        tensor = self._tensor(name)
        bounds = self._engine.info.profiles[self._profile][name]
        return tensor.is_shape_tensor or bounds.contains(tuple(shape))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address, "TensorRT takes no null pointer"
        self._addresses[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        assert name not in self._allocators, "every allocator lives as long as the context: one is enough"
        self._allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        missing = [tensor.name for tensor in self._engine.info.inputs if tensor.name not in self._shapes]
        if not missing:
            outputs = self._compute()
            self._outputs = {name: array.shape for name, array in outputs.items()}
        return missing

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert self._outputs is not None, "shapes of outputs are known after infer_shapes"
        shape = self._outputs[name]
        return tuple(-1 for _ in shape) if name in self._engine.growing else shape

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == Stream.cuda_stream
        assert self._outputs is not None, "infer_shapes was not asked"
        if not self._engine.fails:
            self._engine.device.gpu.queue().append(self._execute)
        return not self._engine.fails

    def _execute(self) -> None:
        for name, array in self._compute().items():
            raw = np.ascontiguousarray(array).tobytes()
            if name in self._engine.growing:
                allocator = self._allocators[name]
                address = allocator.reallocate_output_async(name, 0, max(1, len(raw)), 256, Stream.cuda_stream)
                allocator.notify_shape(name, array.shape)
            else:
                address = self._addresses[name]
            ctypes.memmove(address, raw, len(raw))

    def _compute(self) -> Mapping[str, Array]:
        inputs = {}
        for tensor in self._engine.info.inputs:
            shape = self._shapes[tensor.name]
            dtype = tensor.datatype.numpy
            raw = ctypes.string_at(self._addresses[tensor.name], prod(shape) * dtype.itemsize)
            inputs[tensor.name] = np.frombuffer(raw, dtype).reshape(shape)
        return self._engine.compute(inputs)

    def _tensor(self, name: str) -> Any:
        return next(tensor for tensor in self._engine.info.tensors if tensor.name == name)


class Engine:
    """`growing` are outputs whose shape depends on the data."""

    device_memory_size_v2 = 64

    def __init__(self, info: EngineInfo, compute: Compute, device: CpuDevice, growing: frozenset[str]) -> None:
        self.info = info
        self.compute = compute
        self.device = device
        self.growing = growing
        self.num_contexts = 0
        self.fails = False

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.device_memory_size_v2 // (1 + profile)

    def create_execution_context(self, strategy: str) -> Context:
        self.num_contexts += 1
        return Context(self)


class _ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


TRT = SimpleNamespace(
    __name__="cpu_tensorrt",
    ILogger=_ILogger,
    IOutputAllocator=type("IOutputAllocator", (), {}),
    ExecutionContextAllocationStrategy=SimpleNamespace(
        STATIC="static", ON_PROFILE_CHANGE="profile", USER_MANAGED="user"
    ),
)


def load(info: EngineInfo, compute: Compute, *, growing: frozenset[str] = frozenset()) -> LoadedEngine:
    """What `load_engine` would give."""
    device = CpuDevice()
    return LoadedEngine(TRT, None, Engine(info, compute, device, growing), info, device)  # type: ignore[arg-type]
