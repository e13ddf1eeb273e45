"""Torch's settings of each thread, and the number of threads that a model computes with."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from .checkpoint import Checkpoint
from .options import EngineOptions

# A checkpoint smaller than this is done sooner by one thread than threads are woken; and where cores are few, a
# thread that waits for another's turn costs a hundred times what it computes.
_SINGLE_THREAD_BYTES = 64 << 20
# Of `compute_aside`: each has an item in memory, and holds Python's lock for a part of its time.
_MOST_ASIDE = 8

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ComputeThread:
    """Who computes is not who loaded, and models of other kinds have their own: so it is looked at before each step."""

    def __init__(self, device: torch.device, num_threads: int | None) -> None:
        """None: as many as torch takes."""
        self._device = device
        self._num_threads = num_threads

    def settle(self) -> None:
        """How many others the calling thread computes with, and the GPU of its streams, events and kernels."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            torch.cuda.set_device(self._device)
        if self._num_threads is not None and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)


def choose_num_threads(checkpoint: Checkpoint, device: torch.device, options: EngineOptions) -> int | None:
    """None: as many as torch takes."""
    if options.num_threads is not None or device.type != "cpu":
        return options.num_threads
    if checkpoint.num_bytes < _SINGLE_THREAD_BYTES:
        return 1
    return share_of_threads(options) if options.tensor_parallel_size > 1 else None


def share_of_threads(options: EngineOptions) -> int:
    """Ranks on one machine share its cores."""
    num_nodes = 1 if options.nodes is None else options.nodes.count
    return max(1, (os.cpu_count() or 1) * num_nodes // options.tensor_parallel_size)


def compute_aside(compute: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The results of items in their order, each computed by one thread, as many at once as the caller computes with.

    Where several threads share one operation after the other, each operation ends with the slowest of them: beside
    other work on the same cores that takes a hundred times what is computed (5 ms for each of 0.05 ms, measured). The
    caller's own operations meanwhile are of one thread, too.
    """
    num_threads, is_inference = min(torch.get_num_threads(), _MOST_ASIDE), torch.is_inference_mode_enabled()

    def run(item: _Item) -> _Result:
        with torch.inference_mode(is_inference):  # a setting of each thread
            return compute(item)

    with _alone():
        if num_threads == 1:
            yield from map(compute, items)
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="pack", initializer=_stay_alone) as threads:
            waiting: deque[Future[_Result]] = deque()
            for item in items:
                waiting.append(threads.submit(run, item))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


@contextmanager
def _alone() -> Iterator[None]:
    """The calling thread shares none of its operations meanwhile. Only Linux's OpenMP can do that."""
    before = torch.get_num_threads()
    _set_own_threads(1)
    try:
        yield
    finally:
        _set_own_threads(before)


def _stay_alone() -> None:
    torch.get_num_threads()  # sets what a new thread begins with
    _set_own_threads(1)


def _set_own_threads(count: int) -> None:
    """Of the calling thread alone: `torch.set_num_threads` is also what later threads begin with."""
    own = _own_threads_setter()
    if own is not None:
        own(count)


@functools.cache
def _own_threads_setter() -> Callable[[int], object] | None:
    found: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    return found
