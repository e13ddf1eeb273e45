"""A device's graphs without a device: operations of torch are recorded, and computed again when a graph is replayed.

As on a device, what a graph leaves in its memory is lost when another graph runs: it becomes NaN or -1 then. Launches
are counted: of a graph one, of operations outside of graphs one each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from modelserver_backends.llm.cuda_graphs import CudaGraphs
from support.torch_attention import TorchAttention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Graph:
    device: Device
    work: list[Callable[[], None]] = field(default_factory=list)
    borrowed: list[torch.Tensor] = field(default_factory=list)

    def replay(self) -> None:
        self.device.num_replays += 1
        with torch.utils._python_dispatch._disable_current_modes():
            for other in self.device.graphs:
                if other is not self:
                    for tensor in other.borrowed:
                        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
        is_view = bool(made) and not func._schema.is_mutable
        if is_view and all(leaf.untyped_storage().data_ptr() in given for leaf in made):
            return result
        if self.open is None:
            self.num_launches += 1
            return result

        def compute() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if _is_tensor(leaf)]
            for old, new in zip(made, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.open.work.append(compute)
        return result


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
        self._device.graphs.append(graph)
        return graph.replay

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._device.open is None, "an address is asked for during a capture"
        assert self._ended is not None
        self._ended.borrowed.append(tensor)
        return tensor


def use_recorded_graphs(device: Device) -> None:
    """Let this process take the host for a device with graphs. All is computed by torch's operations, then."""
    from modelserver_backends.llm import cuda_graphs, kernels, runner, tensor_parallel

    cuda_graphs.DEVICE_TYPES = {"cpu"}
    kernels.KERNELS = kernels.PACKED_KERNELS = None
    runner.CudaGraphs = tensor_parallel.CudaGraphs = lambda: RecordedGraphs(device)
    runner.make_attention = tensor_parallel.make_attention = lambda _name, blocks, spec: TorchAttention(blocks, spec)


def record_sums(device: Device) -> None:
    """Let sums over ranks be in graphs, as those of NCCL are."""
    from modelserver_backends.llm import tensor_parallel

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

    tensor_parallel.join = joined


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
