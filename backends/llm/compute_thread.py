"""Torch's settings of each thread, and the number of threads that a model computes with."""

from __future__ import annotations

import os

import torch

from .checkpoint import Checkpoint
from .options import EngineOptions

# A checkpoint smaller than this is done sooner by one thread than threads are woken; and where cores are few, a
# thread that waits for another's turn costs a hundred times what it computes.
_SINGLE_THREAD_BYTES = 64 << 20


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
    """Ranks on one CPU share its cores."""
    return max(1, (os.cpu_count() or 1) // options.tensor_parallel_size)
