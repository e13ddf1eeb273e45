"""A GPU of torch's without one: what is queued on a stream is computed when the stream is waited for, not before.

So a result that is read too early, and memory that is written again too early, are wrong numbers. `waits` counts how
often the host waited.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from modelserver.backend import DeviceArray
from modelserver.platform.cuda import Cuda

_ALIGNMENT, _LIBRARY_ALIGNMENT = 512, 256
_GARBAGE = 0xCD


class Stream:
    """Its work, in order."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.work: list[Callable[[], object]] = []
        self.cuda_stream = gpu.new_handle(self)

    def synchronize(self) -> None:
        assert not self._gpu.is_capturing, "a stream is waited for during a capture"
        self._gpu.num_waits += 1
        if self._gpu.fault is not None:
            raise self._gpu.fault
        self.finish()

    def wait_stream(self, other: Stream) -> None:
        """What is queued here from now on comes after what is queued there now."""
        self.work.append(other.finish)

    def finish(self) -> None:
        """Do all the work, without counting that the host waits."""
        with torch._C.DisableTorchFunction():
            while self.work:
                self.work.pop(0)()


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        assert self._stream is not None, "an event is waited for that was not recorded"
        self._stream.synchronize()


class Graph:
    """A captured graph: what was queued meanwhile."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.work: list[Callable[[], object]] = []
        self.stream: Stream | None = None
        self.num_replays = 0

    def capture_begin(self, *, capture_error_mode: str) -> None:
        self._gpu.begin(self, capture_error_mode)

    def capture_end(self) -> None:
        self._gpu.end(self)

    def replay(self) -> None:
        self.num_replays += 1
        self._gpu.queue().extend(self.work)


class FakeGpu(TorchFunctionMode):
    """Tensors of the host stand for the device's; `install` puts the rest in the place of `torch.cuda`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self.graphs: list[Graph] = []
        self._current = threading.local()
        self._handles: dict[int, Stream] = {}
        # Of threads that have chosen no stream.
        self.default = Stream(self)
        # Raised by all that is waited for from now on, as after an error that stays.
        self.fault: RuntimeError | None = None
        # By address, kept alive so that none comes twice.
        self._on_device: dict[int, torch.Tensor] = {}
        self._pinned: dict[int, torch.Tensor] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, fake in (
            ("Stream", lambda _device=None: Stream(self)),
            ("CUDAGraph", lambda: Graph(self)),
            ("graph", self.capture),
            ("stream", self.current),
            ("current_stream", lambda _device=None: self._streams[-1] if self._streams else self.default),
            ("empty_cache", lambda: None),
            ("device", lambda _device: contextlib.nullcontext()),
        ):
            monkeypatch.setattr(torch.cuda, name, fake)

    @property
    def _streams(self) -> list[Stream | Graph]:
        """Those that are current, one within the other, in this thread."""
        if not hasattr(self._current, "streams"):
            self._current.streams = []
        found: list[Stream | Graph] = self._current.streams
        return found

    @property
    def is_active(self) -> bool:
        """Whether this thread has made the device its current one."""
        return getattr(self._current, "depth", 0) > 0

    def __enter__(self) -> FakeGpu:
        self._current.depth = getattr(self._current, "depth", 0) + 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._current.depth -= 1
        super().__exit__(*error)

    def new_handle(self, stream: Stream) -> int:
        handle = 0x1000 + len(self._handles)
        self._handles[handle] = stream
        return handle

    def finish(self, handle: int) -> None:
        """Do the work of the stream with this handle, as calls of libraries do that wait for it."""
        self._handles[handle].finish()

    @property
    def streams(self) -> list[Stream]:
        return list(self._handles.values())

    def queue_of(self, handle: int) -> list[Callable[[], object]]:
        """Where a library queues what it is asked to on the stream with this handle: in the graph that captures it."""
        stream = self._handles[handle]
        top = self._streams[-1] if self._streams else None
        return top.work if isinstance(top, Graph) and top.stream is stream else stream.work

    @property
    def is_capturing(self) -> bool:
        return bool(self._streams) and isinstance(self._streams[-1], Graph)

    def queue(self) -> list[Callable[[], object]]:
        assert self._streams, "work is queued outside the lane's stream"
        return self._streams[-1].work

    @contextlib.contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        self._streams.append(stream)
        try:
            with self:  # modes of torch are each thread's own
                yield
        finally:
            self._streams.pop()

    @contextlib.contextmanager
    def capture(self, graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        with self.current(stream):
            self.begin(graph, capture_error_mode)
            try:
                yield
            finally:
                self.end(graph)

    def begin(self, graph: Graph, error_mode: str) -> None:
        """What is queued on the current stream is recorded."""
        assert error_mode == "thread_local", "other threads may use the device meanwhile"
        assert self._streams, "a capture is on a stream that was chosen"
        assert not self.is_capturing, "a graph begins within another"
        assert not self._streams[-1].work, "a capture begins on a stream that is done"
        assert not gc.isenabled(), "a collection may destroy what belongs to the device, during a capture"
        self.graphs.append(graph)
        stream = self._streams[-1]
        assert isinstance(stream, Stream)
        graph.stream = stream
        self._streams.append(graph)

    def end(self, graph: Graph) -> None:
        assert self._streams.pop() is graph, "a graph ends that has not begun"

    def is_on_device(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and _address(value) in self._on_device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, aligned as torch's is, with whatever is in it."""
        memory = torch.full((num_bytes + _ALIGNMENT,), _GARBAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % _ALIGNMENT
        return self.on_device(memory[start : start + num_bytes])

    def check_address(self, address: int, num_bytes: int, *, is_host: bool) -> None:
        """Raise AssertionError for a tensor of a library in memory of the wrong kind, or in too little of it."""
        for tensors, is_wrong in ((self._on_device, is_host), (self._pinned, not is_host)):
            for tensor in list(tensors.values()):
                end = tensor.data_ptr() + tensor.nbytes
                if tensor.data_ptr() <= address < end:
                    assert not is_wrong, "a tensor of the host is on the device, or the other way around"
                    assert address + num_bytes <= end, "a tensor is larger than its memory"
                    assert is_host or address % _LIBRARY_ALIGNMENT == 0, "a tensor is not aligned"
                    return

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, as memory of the device from now on."""
        self._on_device[_address(tensor)] = tensor
        return tensor

    def borrowed(self, array: DeviceArray) -> torch.Tensor:
        """The bytes of an array of `array_over`."""
        interface = array.__cuda_array_interface__
        assert interface["typestr"] == "|u1", "torch does not know every type of NumPy's"
        (num_bytes,), (address, is_read_only) = interface["shape"], interface["data"]
        assert not is_read_only
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return self.on_device(torch.from_numpy(np.ctypeslib.as_array(memory)))

    def launched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A program whose operations do not come by here one by one: its results are computed when the stream is."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                results = call(*args, **kwargs)
                leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
                for leaf in leaves:
                    leaf.fill_(float("nan") if leaf.is_floating_point() else -1)
                    self.on_device(leaf)

            def compute() -> None:
                again = [leaf for leaf in tree_leaves(call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for old, new in zip(leaves, again, strict=True):
                    old.copy_(new)

            self.queue().append(compute)
            return results

        return launch

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, as memory of the host that the device may read by itself."""
        self._pinned[_address(tensor)] = tensor
        return tensor

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            if name == "pin_memory":
                return self.pinned(args[0].clone())
            if func is torch.empty and "pin_memory" in kwargs:
                is_pinned = kwargs.pop("pin_memory")
                made = func(*args, **kwargs)
                return self.pinned(made) if is_pinned else made
            if func is torch.empty and str(kwargs.get("device", "")).startswith("cuda"):
                assert kwargs["dtype"] is torch.uint8
                return self.allocate(*args)
            if func is torch.as_tensor and isinstance(args[0], DeviceArray):
                return self.borrowed(args[0])
            if name == "to" and isinstance(args[1], torch.device) and args[1].type == "cuda":
                return self._moved(args[0], is_waited=not kwargs.get("non_blocking", False))
            if func == torch.Tensor.is_cuda.__get__:
                return self.is_on_device(args[0])
            if name == "is_pinned":
                return _address(args[0]) in self._pinned
            if name == "copy_" and (self.is_on_device(args[0]) or self.is_on_device(args[1])):
                is_free = self.is_on_device(args[1]) or _address(args[1]) in self._pinned
                assert is_free or not kwargs.get("non_blocking"), "memory that is not pinned is read in the back"
                self.queue().append(lambda: args[0].copy_(args[1]))
                return args[0]
            if not any(map(self.is_on_device, tree_leaves((args, kwargs)))):
                return func(*args, **kwargs)
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and not self.is_on_device(result):
                result.fill_(float("nan") if result.is_floating_point() else -1)
                self.queue().append(lambda: result.copy_(func(*args, **kwargs)))
                return self.on_device(result)
            return result

    def _moved(self, source: torch.Tensor, *, is_waited: bool) -> torch.Tensor:
        target = self.on_device(torch.full_like(source, float("nan") if source.is_floating_point() else -1))
        assert is_waited or _address(source) in self._pinned, "memory that is not pinned is copied in the back"
        self.queue().append(lambda: target.copy_(source))
        return target


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def array_over(values: np.ndarray[Any, Any]) -> DeviceArray:
    """Registered memory of a device, which is the array's own: keep that."""
    return DeviceArray(Cuda(FakeCuda()), 0, values.ctypes.data, values.dtype, values.shape)
