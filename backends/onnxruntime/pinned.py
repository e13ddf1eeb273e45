"""Staging of inputs in memory that the GPU reads by itself: page-locked, and kept from run to run.

Data from a socket lies in pageable memory, which the driver would copy through a buffer of its own, piece by
piece. Memory is allocated by the CUDA runtime that ONNX Runtime has loaded (cudaHostAlloc of the CUDA Runtime API).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import numpy as np

from modelserver.backend import Array

# Whichever is in the process: the provider's library has loaded its own.
_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_HOST_ALLOC_PORTABLE = 1
_LEAST_BYTES = 1 << 16

Allocate = Callable[[int], Array | None]


class Staging:
    """One buffer for each input of one instance. `allocate` gives bytes, or None where there is no such memory."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._buffers: dict[str, Array] = {}

    def stage(self, name: str, array: Array) -> Array:
        """The array's values in the buffer, which holds them until the next call; the array itself if there is none."""
        if array.dtype.hasobject or not array.nbytes:
            return array
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < array.nbytes:
            # To the next power of two, so that slowly growing batches do not allocate each time.
            buffer = self._allocate(max(_LEAST_BYTES, 1 << (array.nbytes - 1).bit_length()))
            if buffer is None:
                return array
            self._buffers[name] = buffer
        staged: Array = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(staged, array)
        return staged


def allocate_pinned(num_bytes: int, device_id: int) -> Array | None:
    """Page-locked bytes, given back with the last array over them; None without a CUDA runtime, or out of memory.

    The device becomes the thread's, as a run makes it: on another one a context would be made, which takes its memory.
    """
    library = _runtime()
    if library is None or library.cudaSetDevice(device_id) != 0:
        return None
    address = ctypes.c_void_p()
    if library.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(num_bytes), _HOST_ALLOC_PORTABLE) != 0:
        return None
    memory = (ctypes.c_uint8 * num_bytes).from_address(address.value or 0)
    weakref.finalize(memory, library.cudaFreeHost, address)
    return np.ctypeslib.as_array(memory)


def _runtime() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
