"""An instance's way to its GPU: a stream of its own, page-locked memory on both ends, and captured graphs.

Written against PyTorch's notes on CUDA semantics (streams, pinned memory, graphs); `tests/gpu` runs it, a machine
without a GPU cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from modelserver.backend import DeviceArray, capture_turn, note_device_error

logger = logging.getLogger(__name__)

# Each captured graph keeps device memory, so at most this many shapes have one.
MAX_GRAPHS = 16
_NUM_WARMUPS = 3


class CudaLane:
    """One instance's stream on one GPU. Used by one thread at a time."""

    def __init__(self, device: str, *, is_pinned: bool) -> None:
        self._device = torch.device(device)
        self.gpu: int = self._device.index or 0
        self._is_pinned = is_pinned
        self._stream: Any = torch.cuda.Stream(self._device)
        # Weights were copied, and perhaps changed to another memory format, on the stream of who loaded them.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Kernels launched within go to the lane's stream. After an error all of them have ended, too: they read and
        write what a request has lent.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                try:
                    self._stream.synchronize()
                except RuntimeError as error:  # the one that is on its way may have nothing to do with the device
                    note_device_error(error)
                raise

    def upload(self, tensor: Any) -> Any:
        """The tensor on the GPU, from pinned memory without waiting. torch keeps that until it has been read."""
        if self._is_pinned:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=self._is_pinned)

    def borrow(self, array: DeviceArray, dtype: Any) -> Any:
        """A tensor over the array's own memory. CUDA's array interface lacks some datatypes, so torch gets bytes."""
        flat = array.beginning(np.dtype(np.uint8), (array.nbytes,))
        return torch.as_tensor(flat, device=self._device).view(dtype).view(array.shape)

    def place(self, tensor: Any, target: DeviceArray) -> None:
        """Copy a tensor of the GPU into the array's memory, without waiting: `download` does."""
        self.borrow(target, tensor.dtype).copy_(tensor, non_blocking=True)

    def download(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors on the CPU, complete: waits for everything on the lane."""
        copies = []
        for tensor in tensors:
            if not tensor.is_cuda:
                copies.append(tensor)
                continue
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._is_pinned)
            copies.append(copy.copy_(tensor, non_blocking=True))
        self._stream.synchronize()
        return copies

    def graphed(self, call: Callable[..., Any]) -> GraphedCall:
        """`call`, captured for shapes that come again."""
        return GraphedCall(call, self._stream)


class GraphedCall:
    """Calls a program, for shapes that came before by replaying a captured graph. Within `CudaLane.open`.

    Results lie in the graph's own memory: they have to be downloaded before the next call. After a capture that failed
    there are no more.
    """

    def __init__(self, call: Callable[..., Any], stream: Any) -> None:
        self._call = call
        self._stream = stream
        self._seen: set[tuple[Any, ...]] = set()
        self._graphs: dict[tuple[Any, ...], tuple[Any, list[Any], Any]] = {}
        self._can_capture = True

    def __call__(self, *tensors: Any) -> Any:
        if any(isinstance(tensor, list) for tensor in tensors):  # texts, which a graph would keep
            return self._call(*tensors)
        # An optional input that was left out is None.
        key = tuple(None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        known = self._graphs.get(key)
        if known is None and self._can_capture and key in self._seen and len(self._graphs) < MAX_GRAPHS:
            known = self._capture(tensors)
            if known is not None:
                self._graphs[key] = known
        if known is None:
            result = self._call(*tensors)
            if len(self._seen) < MAX_GRAPHS * 64:  # not of inputs that the program refuses
                self._seen.add(key)
            return result
        graph, inputs, results = known
        for fixed, tensor in zip(inputs, tensors, strict=True):
            if tensor is not None:
                fixed.copy_(tensor)
        graph.replay()
        return results

    def _capture(self, tensors: Sequence[Any]) -> tuple[Any, list[Any], Any] | None:
        """A graph, its inputs and results. None if the program has what a graph cannot hold, or memory is out."""
        try:
            inputs = [None if tensor is None else tensor.clone() for tensor in tensors]
            for _ in range(_NUM_WARMUPS):  # libraries choose their kernels and take their memory
                self._call(*inputs)
            # Not `torch.cuda.graph`, which waits for the whole device: for all other models, and not while another
            # library captures.
            self._stream.synchronize()
            torch.cuda.empty_cache()  # the memory of a graph is its own
            with capture_turn():
                graph, results = self._recorded(inputs)
        except RuntimeError as error:
            if note_device_error(error):
                raise
            self._can_capture = False
            logger.warning("a model of PyTorch runs without CUDA graphs: %s", error)
            return None
        return graph, inputs, results

    def _recorded(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for other models.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            results = self._call(*inputs)
        except BaseException:
            with suppress(RuntimeError):  # the one that is on its way says why
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, results
