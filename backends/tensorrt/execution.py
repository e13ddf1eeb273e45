"""One execution context of an engine, and a batch's way through it: set shapes, copy, enqueue, copy back.

Everything is queued on one stream; the thread then sleeps until the last copy is done. What must come in which order
is TensorRT's: the profile, then shapes, then addresses, then the question for output shapes, then the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from modelserver.backend import Array, Datatype, DeviceArray, InternalError, InvalidArgumentError, note_device_error

from .device import Device
from .engine import LoadedEngine, require_context
from .engine_info import IoTensor, Shape
from .runtime import logger_of


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of an instance. `copy_out` is a separate stream for outputs, or the same one."""

    compute: Any
    copy_out: Any
    done: Any
    is_input_pinned: bool = True
    is_output_pinned: bool = True

    @contextlib.contextmanager
    def drained_on_error(self) -> Iterator[None]:
        """Wait for what is queued before an error leaves: the memory it reads and writes may be a client's."""
        try:
            yield
        except BaseException:
            try:
                self.compute.synchronize()
                self.copy_out.synchronize()
            except RuntimeError as error:  # the one that is on its way may have nothing to do with the device
                note_device_error(error)
            raise


@dataclass(slots=True)
class Output:
    """An output of one execution on the device; its shape is known at the latest when the stream is done.

    `target` is the memory if it is a client's, and the output stays there.
    """

    tensor: IoTensor
    shape: Shape
    memory: Any
    target: DeviceArray | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * itemsize(self.tensor.datatype)


def itemsize(datatype: Datatype) -> int:
    return datatype.numpy.itemsize


class Execution:
    """A context on one profile. One call at a time."""

    def __init__(self, loaded: LoadedEngine, profile: int, streams: Streams, context: Any) -> None:
        """`context` is the library's; the profile is set here. Raises InternalError if it cannot be."""
        self.profile = profile
        self._loaded = loaded
        self._device: Device = loaded.device
        self._streams = streams
        self._context = context
        self._logger = logger_of(loaded.trt)
        # By output whose shape depends on the data, made when that is seen.
        self._growing: dict[str, _Growing] = {}
        self._mark = self._logger.mark()
        try:
            context.set_optimization_profile_async(profile, streams.compute.cuda_stream)
        except RuntimeError as error:  # the binding's way to say no
            raise self._failure(f"optimization profile {profile} cannot be set") from error
        streams.compute.synchronize()

    def run(
        self, inputs: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> dict[str, Array | DeviceArray]:
        """The outputs of a batch, in their targets if these are large enough, or in fresh memory.

        `inputs` have the engine's ranks; shape tensors are arrays too.

        Raises InvalidArgumentError for shapes that the engine refuses, InternalError when it fails.
        """
        self._mark = self._logger.mark()
        torch = self._device.torch
        with torch.cuda.stream(self._streams.compute), self._streams.drained_on_error():
            # Host and device buffers: they must live until the stream is done.
            held = [self._bind_input(tensor, inputs[tensor.name]) for tensor in self._loaded.info.inputs]
            outputs = self._bind_outputs(targets)
            if not self._context.execute_async_v3(self._streams.compute.cuda_stream):
                raise self._failure("the execution failed")
            arrays = self._fetch(outputs)
        del held
        return arrays

    def bind(self, shapes: Mapping[str, Shape], buffers: Mapping[str, Any]) -> list[Output]:
        """Fix shapes and input addresses for good, for a CUDA graph; gives the outputs, fixed as well."""
        for tensor in self._loaded.info.inputs:
            self._set_input(tensor.name, shapes[tensor.name], buffers[tensor.name].data_ptr())
        outputs = self._bind_outputs({})
        if any(isinstance(output, _Growing) for output in outputs):
            raise InternalError("outputs whose shape depends on the data cannot be in a CUDA graph")
        return [output for output in outputs if isinstance(output, Output)]

    def enqueue(self) -> None:
        """Queue one execution of what `bind` has fixed. Raises InternalError."""
        if not self._context.execute_async_v3(self._streams.compute.cuda_stream):
            raise self._failure("the execution failed")

    def copy_in(self, array: Array | DeviceArray, target: Any) -> Any:
        """Queue the copy of an array to the device; what is given back must live until the stream is done."""
        if isinstance(array, DeviceArray):
            staged = self._device.borrow(array)
            target[: staged.numel()].copy_(staged, non_blocking=True)
            return staged
        staged = self._device.host_copy(array, is_pinned=self._streams.is_input_pinned)
        target[: staged.numel()].copy_(staged, non_blocking=True)
        return staged

    def fetch(self, outputs: list[Output]) -> dict[str, Array | DeviceArray]:
        """Queue the copies of outputs, and wait for all that is queued."""
        return self._fetch(list(outputs))

    def close(self) -> None:
        """Free the context."""
        self._context = None
        self._growing.clear()

    def _bind_input(self, tensor: IoTensor, array: Array | DeviceArray) -> list[Any]:
        if isinstance(array, DeviceArray):
            self._set_input(tensor.name, array.shape, array.address)
            return [array]
        if tensor.is_shape_tensor:
            # Read on the host, when shapes are inferred and when the work is queued.
            staged = self._device.host_copy(array)
            self._set_input(tensor.name, array.shape, staged.data_ptr())
            return [staged]
        target = self._device.empty(array.nbytes)
        staged = self.copy_in(array, target)
        self._set_input(tensor.name, array.shape, target.data_ptr())
        return [staged, target]

    def _set_input(self, name: str, shape: Shape, address: int) -> None:
        if not self._context.set_input_shape(name, tuple(shape)):
            reason = self._logger.errors_since(self._mark)
            raise InvalidArgumentError(f"input '{name}': TensorRT refuses the shape {list(shape)}: {reason}")
        if not self._context.set_tensor_address(name, address):
            raise self._failure(f"input '{name}' cannot be bound")

    def _bind_outputs(self, targets: Mapping[str, DeviceArray]) -> list[Output | _Growing]:
        outputs = self._loaded.info.outputs
        # TensorRT writes shape tensors while it infers, to the memory that they have by then: not the last batch's.
        on_host = {tensor.name: self._bind_shape_output(tensor) for tensor in outputs if tensor.is_shape_tensor}
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            reason = self._logger.errors_since(self._mark)
            raise InvalidArgumentError(f"TensorRT cannot infer the outputs' shapes: {error} ({reason})") from error
        if missing:
            raise InternalError(f"TensorRT still lacks a shape or value of {', '.join(missing)}")
        return [on_host.get(tensor.name) or self._bind_output(tensor, targets.get(tensor.name)) for tensor in outputs]

    def _bind_shape_output(self, tensor: IoTensor) -> Output:
        """The number of a shape tensor's values is known with the engine."""
        memory = self._device.pinned(prod(tensor.dims) * itemsize(tensor.datatype))
        self._set_output(tensor.name, memory.data_ptr())
        return Output(tensor, tensor.dims, memory)

    def _bind_output(self, tensor: IoTensor, target: DeviceArray | None) -> Output | _Growing:
        shape = tuple(int(size) for size in self._context.get_tensor_shape(tensor.name))
        if -1 in shape:
            return self._grow(tensor)
        if target is not None and prod(shape) * itemsize(tensor.datatype) <= target.nbytes:
            output = Output(tensor, shape, None, target.beginning(tensor.datatype.numpy, shape))
        else:
            output = Output(tensor, shape, self._device.empty(prod(shape) * itemsize(tensor.datatype)))
        self._set_output(tensor.name, output.memory.data_ptr() if output.target is None else output.target.address)
        return output

    def _set_output(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise self._failure(f"output '{name}' cannot be bound")

    def _grow(self, tensor: IoTensor) -> _Growing:
        # One allocator for the life of the context, because the binding keeps every allocator that it gets.
        growing = self._growing.get(tensor.name)
        if growing is None:
            growing = self._growing[tensor.name] = _Growing(
                tensor, output_allocator_class(self._loaded.trt)(self._device)
            )
            if not self._context.set_output_allocator(tensor.name, growing.allocator):
                raise self._failure(f"output '{tensor.name}' cannot be bound")
        growing.allocator.reset()
        return growing

    def _fetch(self, outputs: list[Output | _Growing]) -> dict[str, Array | DeviceArray]:
        streams = self._streams
        if any(isinstance(output, _Growing) for output in outputs):
            streams.compute.synchronize()  # only now is it known how large they are
        known = [output.output() if isinstance(output, _Growing) else output for output in outputs]
        if streams.copy_out is not streams.compute:
            streams.copy_out.wait_stream(streams.compute)
        staged: dict[str, Any] = {}
        with self._device.torch.cuda.stream(streams.copy_out):
            for output in known:
                if output.target is not None:
                    continue
                if output.tensor.is_shape_tensor:
                    staged[output.tensor.name] = output.memory
                    continue
                host = self._device.pinned(output.num_bytes, is_pinned=streams.is_output_pinned)
                host[: output.num_bytes].copy_(output.memory[: output.num_bytes], non_blocking=True)
                staged[output.tensor.name] = host
            streams.done.record(streams.copy_out)
        streams.done.synchronize()
        return {
            output.tensor.name: _array(output, staged[output.tensor.name]) if output.target is None else output.target
            for output in known
        }

    def _failure(self, what: str) -> InternalError:
        return InternalError(f"{what}: {self._logger.errors_since(self._mark)}")


def _array(output: Output, host: Any) -> Array:
    """The bytes as an array, which keeps the memory; nothing is copied."""
    raw = host.numpy()[: output.num_bytes]
    array: Array = raw.view(output.tensor.datatype.numpy).reshape(output.shape)
    return array


class _Growing:
    """An output whose shape depends on the data: TensorRT asks for its memory in the midst of the work."""

    def __init__(self, tensor: IoTensor, allocator: Any) -> None:
        self.tensor = tensor
        self.allocator = allocator

    def output(self) -> Output:
        if self.allocator.shape is None:
            raise InternalError(f"output '{self.tensor.name}': TensorRT reported no shape")
        return Output(self.tensor, self.allocator.shape, self.allocator.memory)


_allocator_classes: dict[str, type[Any]] = {}


def output_allocator_class(trt: Any) -> type[Any]:
    """The class of output allocators of a library. Called by TensorRT's threads: nothing may be raised within."""
    if trt.__name__ in _allocator_classes:
        return _allocator_classes[trt.__name__]

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]  # a base that is only known at run time
        """Device memory for one output of one execution."""

        def __init__(self, device: Device) -> None:
            trt.IOutputAllocator.__init__(self)
            self._device = device
            self.memory: Any = None
            self.shape: Shape | None = None

        def reset(self) -> None:
            """Called before each execution: the outputs of the last one belong to their readers."""
            self.memory = None
            self.shape = None

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            del name, memory, alignment, stream  # blocks are aligned, and of the instance's current stream
            if self.memory is None or self.memory.numel() < size:
                try:
                    self.memory = self._device.empty(size)
                except self._device.torch.cuda.OutOfMemoryError:
                    return 0  # TensorRT then fails the execution, and says so
            return int(self.memory.data_ptr())

        def notify_shape(self, name: str, dims: Any) -> None:
            del name
            self.shape = tuple(int(size) for size in dims)

    _allocator_classes[trt.__name__] = OutputAllocator
    return OutputAllocator


def new_context(loaded: LoadedEngine, strategy: str, cuda_graphs: bool, runtime_cache: Any) -> Any:
    """An execution context of the library. Raises InternalError.

    TensorRT for RTX captures CUDA graphs by itself and keeps the kernels that it compiles in `runtime_cache`.
    """
    trt, engine = loaded.trt, loaded.engine
    logger = logger_of(trt)
    mark = logger.mark()
    allocation = getattr(trt.ExecutionContextAllocationStrategy, strategy)
    if loaded.captures_by_itself:
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(allocation)
        if cuda_graphs:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if runtime_cache is not None:
            config.set_runtime_cache(runtime_cache)
        context = engine.create_execution_context(config)
    else:
        context = engine.create_execution_context(allocation)
    return require_context(context, logger, mark, "no instance can be created")


def as_values(array: Array) -> Shape:
    """The values of a shape tensor."""
    return tuple(int(value) for value in np.asarray(array).reshape(-1))
