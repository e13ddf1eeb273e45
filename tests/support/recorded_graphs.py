"""A device's graphs without a device: operations of torch are recorded, and computed again when a graph is replayed.

As on a device, what a graph leaves in its memory is lost when another graph runs: it becomes NaN or -1 then. What is
captured is not computed: when the graph ends, its tensors become NaN or -1, and those that it has written to are as
they were before. A capture fails in which the host waits for numbers, or memory of NumPy's is read. Launches are
counted: of a graph one, of operations outside of graphs one each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from modelserver_backends.llm.cuda_graphs import CudaGraphs
from support.torch_attention import TorchAttention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READ_BY_THE_HOST = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
}
_INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
_NAMES_OF_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}


@dataclass(eq=False)
class Graph:
    device: Device
    work: list[Callable[[], None]] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    # Into which Python's numbers were put meanwhile, by address.
    lists: dict[int, torch.Tensor] = field(default_factory=dict)
    # What it writes to, and what that was, by address.
    written: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    borrowed: list[torch.Tensor] = field(default_factory=list)

    def end(self) -> None:
        """Nothing of it has been computed."""
        with torch.utils._python_dispatch._disable_current_modes():
            for tensor in self.made:
                _lose(tensor)
            for tensor, before in self.written.values():
                tensor.copy_(before)
        self.made.clear()
        self.written.clear()
        self.lists.clear()

    def replay(self) -> None:
        self.device.check("a graph is launched")
        self.device.num_replays += 1
        with torch.utils._python_dispatch._disable_current_modes():
            for other in self.device.graphs:
                if other is not self:
                    for tensor in other.borrowed:
                        _lose(tensor)
            for compute in self.work:
                compute()


class Device(TorchDispatchMode):
    """`refuses`: captures fail."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[Graph] = []
        self.open: Graph | None = None
        self.refuses = False
        self.num_replays = self.num_launches = 0
        self._functions = _HostReads(self)

    def __enter__(self) -> Device:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def check(self, what: str) -> None:
        """Raise as CUDA does for what a capture must not do."""
        if self.open is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.open is not None:
            self._check(func, args)
            if func._schema.is_mutable:
                self._remember(self.open, func, args, kwargs)
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
        is_view = bool(made) and not func._schema.is_mutable
        if is_view and all(leaf.untyped_storage().data_ptr() in given for leaf in made):
            if self.open is not None and func.overloadpacket is torch.ops.aten.lift_fresh:  # torch.tensor of a list
                self.open.lists |= {leaf.untyped_storage().data_ptr(): leaf for leaf in made}
            return result
        if self.open is None:
            self.num_launches += 1
            return result
        if given & set(self.open.lists) and func.overloadpacket is not torch.ops.aten.detach_:
            self.check(f"{func} reads numbers of Python's")

        def compute() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if _is_tensor(leaf)]
            for old, new in zip(made, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.open.work.append(compute)
        if not func._schema.is_mutable:
            self.open.made += made
        return result

    def _check(self, func: Any, args: Any) -> None:
        if func.overloadpacket in _READ_BY_THE_HOST:
            self.check(f"the host waits for {func}")
        if func.overloadpacket in _INDEXED and any(
            _is_tensor(leaf) and leaf.dtype is torch.bool for leaf in tree_leaves(args[1])
        ):
            # A single value goes where the mask says, without places.
            is_filled = len(args) > 2 and args[2].numel() == 1
            if not is_filled:
                self.check("a mask becomes places")
        if func.overloadpacket is torch.ops.aten.copy_ and not args[1].untyped_storage().resizable():
            self.check("pageable memory of NumPy's is read")

    def _remember(self, graph: Graph, func: Any, args: Any, kwargs: Any) -> None:
        own = {tensor.untyped_storage().data_ptr() for tensor in graph.made}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
                address = tensor.untyped_storage().data_ptr() if _is_tensor(tensor) else 0
                if address and address not in own and address not in graph.written:
                    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                    graph.written[address] = whole, whole.clone()


class _HostReads(TorchFunctionMode):
    """Calls that give numbers to the host without an operation, where the tensor is the host's."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device.open is not None and getattr(func, "__name__", "") in _NAMES_OF_READS:
            self._device.check(f"the host waits for {func.__name__}")
        return func(*args, **(kwargs or {}))


def _lose(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class RecordedGraphs(CudaGraphs):
    """Of one device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._ended: Graph | None = None

    def warm_up(self, compute: Callable[[], object]) -> None:
        compute()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        if self._device.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.begin()
        try:
            yield
        finally:
            self._device.open = None

    def begin(self) -> None:
        assert self._device.open is None, "a graph begins within another"
        self._device.open = Graph(self._device)

    def end(self) -> Callable[[], None]:
        graph = self._ended = self._device.open
        assert graph is not None, "a graph ends that has not begun"
        self._device.open = None
        graph.end()
        self._device.graphs.append(graph)
        return graph.replay

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._device.open is None, "an address is asked for during a capture"
        assert self._ended is not None
        self._ended.borrowed.append(tensor)
        return tensor


def use_recorded_graphs(device: Device) -> None:
    """Let this process take the host for a device with graphs. All is computed by torch's operations, then; attention
    too, unless `sdpa` is asked for."""
    from modelserver_backends.llm import cuda_graphs, kernels, rank_process, runner

    cuda_graphs.DEVICE_TYPES = {"cpu"}
    kernels.KERNELS = kernels.PACKED_KERNELS = None
    runner.CudaGraphs = rank_process.CudaGraphs = lambda: RecordedGraphs(device)
    make = runner.make_attention

    def make_attention(name: str, blocks: Any, spec: Any) -> Any:
        return make(name, blocks, spec) if name == "sdpa" else TorchAttention(blocks, spec)

    runner.make_attention = rank_process.make_attention = make_attention


@contextlib.contextmanager
def recorded_graphs() -> Iterator[Device]:
    """The same for a while, and what this thread computes is recorded."""
    from modelserver_backends.llm import cuda_graphs, kernels, rank_process, runner

    names = {
        cuda_graphs: ("DEVICE_TYPES",),
        kernels: ("KERNELS", "PACKED_KERNELS"),
        runner: ("CudaGraphs", "make_attention"),
        rank_process: ("CudaGraphs", "make_attention"),
    }
    kept: list[tuple[Any, str, Any]] = [
        (module, name, getattr(module, name)) for module, each in names.items() for name in each
    ]
    kept.append((torch.cuda, "synchronize", torch.cuda.synchronize))
    device = Device()
    use_recorded_graphs(device)
    torch.cuda.synchronize = lambda _device=None: device.check("the device is waited for")
    try:
        with device:
            yield device
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def record_sums(device: Device) -> None:
    """Let sums over ranks be in graphs, as those of NCCL are."""
    from modelserver_backends.llm import rank_process, tensor_parallel

    join = tensor_parallel.join

    def joined(*args: Any, **kwargs: Any) -> Any:
        rank = join(*args, **kwargs)

        def add_up(part: torch.Tensor) -> torch.Tensor:
            if device.open is None:
                return rank.sum(part)
            assert part.is_contiguous(), "the sum is taken in place"
            device.open.work.append(lambda: rank.sum(part))
            return part

        return replace(rank, sum=add_up)

    tensor_parallel.join = rank_process.join = joined


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
