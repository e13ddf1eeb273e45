"""The CUDA layer, on torch: buffers, streams, copies, graphs. Everything is bytes: datatypes are the caller's affair.

Torch's allocators keep what is freed, on the device and of pinned memory, so a batch costs no cudaMalloc. Its
device blocks are aligned to 512 bytes; TensorRT wants 256.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np

from modelserver.backend import Array, DeviceArray, UnavailableError


class Device:
    """One GPU."""

    def __init__(self, device_id: int) -> None:
        """Raises UnavailableError when torch, or its CUDA side, is not there, or has no such GPU."""
        self.torch: Any = _torch()
        if not self.torch.cuda.is_available():
            raise UnavailableError(
                f"the installed PyTorch {self.torch.__version__} cannot use the GPU, and TensorRT's memory is "
                "PyTorch's: install a build with CUDA (https://pytorch.org/get-started)"
            )
        count = self.torch.cuda.device_count()
        if device_id >= count:
            raise UnavailableError(f"GPU {device_id} is not there: PyTorch sees {count}, numbered from 0")
        self.device_id = device_id
        self.name = f"cuda:{device_id}"

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Make it this thread's current device."""
        with self.torch.cuda.device(self.device_id):
            yield

    @property
    def compute_capability(self) -> str:
        """As "9.0"."""
        major, minor = self.torch.cuda.get_device_capability(self.device_id)
        return f"{major}.{minor}"

    def free_bytes(self) -> int:
        """The memory that can be allocated now, in bytes."""
        free, _ = self.torch.cuda.mem_get_info(self.device_id)
        return int(free)

    def describe(self) -> dict[str, Any]:
        """The properties of the device that an engine built here depends on."""
        properties = self.torch.cuda.get_device_properties(self.device_id)
        return {
            "gpu": properties.name,
            "compute_capability": self.compute_capability,
            "num_multiprocessors": properties.multi_processor_count,
        }

    def new_stream(self, *, is_urgent: bool = False) -> Any:
        return self.torch.cuda.Stream(self.device_id, priority=-1 if is_urgent else 0)

    def new_event(self, *, busy_waits: bool = False) -> Any:
        """An event whose waiter sleeps, or spins: quicker by microseconds, for a core."""
        return self.torch.cuda.Event(blocking=not busy_waits)

    def empty(self, num_bytes: int) -> Any:
        """Device memory, of the current stream. TensorRT takes no null pointers, so there is always a byte."""
        return self.torch.empty(max(1, num_bytes), dtype=self.torch.uint8, device=self.name)

    def borrow(self, array: DeviceArray) -> Any:
        """The bytes of an array that lies on the device, without a copy."""
        return self.torch.as_tensor(array.beginning(np.dtype(np.uint8), (array.nbytes,)), device=self.name)

    def pinned(self, num_bytes: int, *, is_pinned: bool = True) -> Any:
        """Host memory that a stream can copy from and to by itself; pageable on request."""
        return self.torch.empty(max(1, num_bytes), dtype=self.torch.uint8, pin_memory=is_pinned)

    def host_copy(self, array: Array, *, is_pinned: bool = True) -> Any:
        """`array`'s bytes in host memory for `copy_`."""
        staged = self.pinned(array.nbytes, is_pinned=is_pinned)
        if array.nbytes:
            staged.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return staged


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError(
            "TensorRT's memory is PyTorch's, which is not installed: pip install 'modelserver-py[tensorrt]'"
        )
    import torch

    return torch
