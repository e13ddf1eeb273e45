"""Arrays of many BYTES elements, made and freed without stopping the other threads for long.

NumPy fills a new object array with None in one call, and releases all of its elements in one call, and holds the
interpreter's lock all the while: 100 ms for ten million elements. The arrays of this module lie in memory that the
system clears page by page, on first use. When the last view of one is gone, a thread releases the elements in slices.
"""

from __future__ import annotations

import _thread
import mmap
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from modelserver.core.large_buffers import scratch

# Elements that are handled before other threads get a turn.
SLICE_ELEMENTS: Final = 16384
# NumPy's own arrays are quicker to make, and up to this size quick enough to fill and to free.
_MAX_OWN_ELEMENTS: Final = 4 * SLICE_ELEMENTS
_REFERENCE_BYTES: Final = np.dtype(object).itemsize
# Long enough for a thread that waits for the interpreter's lock to get it.
_PAUSE_S: Final = 0.0001

Elements = np.ndarray[Any, np.dtype[np.object_]]


def empty_elements(count: int) -> Elements:
    """A flat object array of that size, in which every element is None."""
    if count <= _MAX_OWN_ELEMENTS:
        return np.empty(count, object)
    return np.asarray(_References(count))


def empty_array(count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A flat array of that size; its content is undefined unless it holds objects."""
    if dtype.hasobject:
        return empty_elements(count)
    return np.ndarray((count,), dtype, scratch(count * dtype.itemsize))


def concatenate(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """As `np.concatenate` along the first dimension; in slices where there are many BYTES elements."""
    if arrays[0].dtype != object or (total := sum(array.size for array in arrays)) <= _MAX_OWN_ELEMENTS:
        return np.concatenate(arrays)
    joined = empty_elements(total)
    done = 0
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, flat.size, SLICE_ELEMENTS):
            part = flat[start : start + SLICE_ELEMENTS]
            joined[done : done + part.size] = part
            done += part.size
    return joined.reshape(-1, *arrays[0].shape[1:])


class _References:
    """Memory for references to elements; NumPy makes an array of it that keeps it alive. A null pointer reads as None.

    An array does not release elements in memory that it does not own: this object does, once no array is left.
    """

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * _REFERENCE_BYTES)
        address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.__array_interface__ = {"version": 3, "typestr": "|O", "shape": (count,), "data": (address, False)}

    def __del__(self) -> None:
        """Runs once: the object lives on while its elements are released."""
        try:
            _thread.start_new_thread(self._release, ())
        except RuntimeError:  # the interpreter ends, or the system has no more threads
            self._release()

    def _release(self) -> None:
        array = np.asarray(self)
        for start in range(0, array.size, SLICE_ELEMENTS):
            # The remaining references to None are never released, which is harmless.
            array[start : start + SLICE_ELEMENTS] = None
            num_bytes = min(SLICE_ELEMENTS, array.size - start) * _REFERENCE_BYTES
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_DONTNEED, start * _REFERENCE_BYTES, num_bytes)
            time.sleep(_PAUSE_S)
