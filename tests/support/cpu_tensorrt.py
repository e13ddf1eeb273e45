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
from modelserver_backends.tensorrt.engine_info import EngineInfo, IoTensor
from support.fake_torch_cuda import Event, FakeGpu, Graph, Stream

Array = np.ndarray[Any, Any]
Compute = Callable[[Mapping[str, Array]], Mapping[str, Array]]


def torch_of(gpu: FakeGpu) -> SimpleNamespace:
    """What a `Device` uses of torch, over a fake GPU."""

    @contextlib.contextmanager
    def device(_number: int) -> Iterator[None]:
        with gpu:
            yield

    cuda = SimpleNamespace(
        CUDAGraph=lambda: Graph(gpu),
        Event=lambda *, blocking: Event(),
        OutOfMemoryError=torch.cuda.OutOfMemoryError,
        Stream=lambda _device, *, priority: Stream(gpu),
        device=device,
        device_count=lambda: 1,
        get_device_capability=lambda _device: (9, 0),
        get_device_properties=lambda _device: SimpleNamespace(name="a GPU", multi_processor_count=4),
        graph=gpu.capture,
        is_available=lambda: True,
        mem_get_info=lambda _device: (1 << 30, 2 << 30),
        stream=gpu.current,
    )
    return SimpleNamespace(as_tensor=torch.as_tensor, cuda=cuda, empty=torch.empty, uint8=torch.uint8)


class CpuDevice(Device):
    """Memory of the host, and streams whose work is done when they are waited for."""

    def __init__(self) -> None:
        self.device_id = 0
        self.name = "cuda:9"  # its budget is that of a device, and nobody else's
        self.num_free_bytes = 1 << 30
        self.gpu = FakeGpu()
        self.torch = torch_of(self.gpu)

    def free_bytes(self) -> int:
        return self.num_free_bytes


class Context:
    """One execution context: every call in the order that TensorRT's documentation asks for."""

    def __init__(self, engine: Engine, *, brings_memory: bool = False) -> None:
        engine.check_device()
        self._engine = engine
        self._lacks_memory = brings_memory
        self._profile: int | None = None
        self._is_switched = False
        self._is_set_up = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._outputs: dict[str, tuple[int, ...]] | None = None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._engine.check_device()
        assert not self._shapes, "the profile comes before any shape"
        if profile >= len(self._engine.info.profiles):
            raise RuntimeError("Error in set optimization profile async.")
        self._profile, self._is_switched = profile, False
        self._engine.gpu.queue_of(stream).append(self._switch)
        return True

    def _switch(self) -> None:
        self._is_switched = True

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % 256 == 0
        assert size >= self._engine.device_memory_size_v2
        self._lacks_memory = False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None, "the profile comes before any shape"
        tensor = self._tensor(name)
        if tensor is None or not tensor.is_input:
            return self._refuse(f"there is no input {name}")
        self._outputs = None
        if self._shapes.get(name) != tuple(shape):
            self._is_set_up = False
        self._shapes[name] = tuple(shape)
        if tensor.is_shape_tensor:
            return tuple(shape) == tensor.dims or self._refuse(f"{name} has {tensor.dims}, got {shape}")
        bounds = self._engine.info.profiles[self._profile][name]
        return bounds.contains(tuple(shape)) or self._refuse(f"{name} is within {bounds.min} and {bounds.max}")

    def set_tensor_address(self, name: str, address: int) -> bool:
        if self._tensor(name) is None:
            return self._refuse(f"there is no tensor {name}")
        assert address, "nothing here forgets an address"
        self._addresses[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        assert name not in self._allocators, "every allocator lives as long as the context: one is enough"
        self._allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        missing = [
            tensor.name
            for tensor in self._engine.info.inputs
            if tensor.name not in self._shapes or (tensor.is_shape_tensor and tensor.name not in self._addresses)
        ]
        if not missing:
            outputs = self._compute(is_inferring=True)
            self._outputs = {name: array.shape for name, array in outputs.items()}
            for tensor in self._engine.info.outputs:
                if tensor.is_shape_tensor and tensor.name in self._addresses:
                    self._write(self._addresses[tensor.name], outputs[tensor.name])
        return missing

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert self._outputs is not None, "shapes of outputs are known after infer_shapes"
        shape = self._outputs[name]
        return tuple(-1 for _ in shape) if name in self._engine.growing else shape

    def execute_async_v3(self, stream: int) -> bool:
        self._engine.check_device()
        assert stream, "the default stream makes TensorRT wait for the whole device"
        if self._lacks_memory:
            return self._refuse("the context has no device memory")
        if self._outputs is None:
            return self._refuse("shapes of outputs are not known")
        for tensor in self._engine.info.tensors:
            if tensor.name not in self._allocators and not self._is_bound(tensor):
                return self._refuse(f"{tensor.name} has no address")
        can_capture = self._is_set_up and not self._allocators and not self._engine.streams_weights
        if self._engine.gpu.is_capturing and not can_capture:
            return self._refuse("operation not permitted when stream is capturing")
        self._is_set_up = True
        if self._engine.fails:
            return False
        queue = self._engine.gpu.queue_of(stream)
        if self._allocators:  # it waits until it knows how much it needs
            self._engine.gpu.finish(stream)
            for name, array in self._compute().items():
                if name in self._allocators:
                    address = self._allocators[name].reallocate_output_async(name, 0, max(1, array.nbytes), 256, stream)
                    if not address:
                        return self._refuse(f"there is no memory for {name}")
                    self._addresses[name] = address
        queue.append(self._execute)
        return True

    def _is_bound(self, tensor: IoTensor) -> bool:
        if tensor.name not in self._addresses:
            return False
        assert self._outputs is not None
        shape = self._shapes[tensor.name] if tensor.is_input else self._outputs[tensor.name]
        num_bytes = prod(shape) * tensor.datatype.numpy.itemsize
        self._engine.gpu.check_address(self._addresses[tensor.name], num_bytes, is_host=tensor.is_shape_tensor)
        return True

    def _refuse(self, reason: str) -> bool:
        self._engine.tell(reason)
        return False

    def _execute(self) -> None:
        assert self._is_switched, "the switch of the profile was not waited for"
        for name, array in self._compute().items():
            if name in self._allocators:
                self._allocators[name].notify_shape(name, array.shape)
            self._write(self._addresses[name], array)

    def _write(self, address: int, array: Array) -> None:
        raw = np.ascontiguousarray(array).tobytes()
        ctypes.memmove(address, raw, len(raw))

    def _compute(self, *, is_inferring: bool = False) -> Mapping[str, Array]:
        """While shapes are inferred nothing of the device is read: what the work depends on is not there yet."""
        inputs = {}
        for tensor in self._engine.info.inputs:
            shape = self._shapes[tensor.name]
            dtype = tensor.datatype.numpy
            if is_inferring and not tensor.is_shape_tensor:
                inputs[tensor.name] = np.zeros(shape, dtype)
                continue
            raw = ctypes.string_at(self._addresses[tensor.name], prod(shape) * dtype.itemsize)
            inputs[tensor.name] = np.frombuffer(raw, dtype).reshape(shape)
        return self._engine.compute(inputs)

    def _tensor(self, name: str) -> IoTensor | None:
        return next((tensor for tensor in self._engine.info.tensors if tensor.name == name), None)


class Engine:
    """`growing` are outputs whose shape depends on the data."""

    device_memory_size_v2 = 64
    streams_weights = False

    def __init__(
        self,
        info: EngineInfo,
        compute: Compute,
        gpu: FakeGpu,
        growing: frozenset[str],
        tell: Callable[[str], object] = lambda _reason: None,
    ) -> None:
        self.info = info
        self.compute = compute
        self.gpu = gpu
        self.growing = growing
        self.tell = tell
        self.num_contexts = 0
        self.fails = False

    def check_device(self) -> None:
        assert self.gpu.is_active, "the device is not this thread's current one"

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.device_memory_size_v2 // (1 + profile)

    def create_execution_context(self, strategy: str) -> Context:
        self.num_contexts += 1
        return Context(self, brings_memory=strategy == "user")


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
    return LoadedEngine(TRT, None, Engine(info, compute, device.gpu, growing), info, device)  # type: ignore[arg-type]
