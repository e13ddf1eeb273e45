"""Settings of this process: glibc's allocator, the garbage collector, and the interpreter's switch interval."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import sys

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest that glibc takes on 64 bit; buffers above it are mapped, and unmapped when freed.
_MMAP_THRESHOLD_BYTES = 32 << 20
# Free memory kept at the top of the heap.
_TRIM_THRESHOLD_BYTES = 256 << 20
_THRESHOLDS = gc.get_threshold()
# Free memory of all heaps that is worth the system calls, and the page faults of requests whose buffers go with it.
_MUCH_BYTES = 64 << 20


class _HeapUse(ctypes.Structure):
    """`struct mallinfo2`: sums over all heaps, in bytes but for the numbers of blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def tune_malloc() -> bool:
    """Let glibc's allocator keep large buffers; False where the C library has no mallopt (macOS, musl).

    By default it returns each freed buffer above its threshold to the kernel, and the next request page-faults it in
    again: several times the cost of copying a 1 MiB tensor.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = _c_library().mallopt
    except AttributeError:
        return False
    is_done = bool(
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    )
    logger.debug("malloc keeps buffers of up to %d bytes: %s", _MMAP_THRESHOLD_BYTES, is_done)
    return is_done


def give_back(min_bytes: int = _MUCH_BYTES) -> bool:
    """Return free memory to the system if it is at least `min_bytes`; True if some was returned.

    No request needs the memory of an unloaded model again, and it stays behind in the separate heap of each thread that
    loads models. A heap is blocked while it is scanned, which takes milliseconds for 100 MiB. From any thread; False
    where the C library is not glibc.
    """
    library = _c_library()
    try:
        count, trim = library.mallinfo2, library.malloc_trim
    except AttributeError:
        return False
    count.restype = _HeapUse
    return bool(count().fordblks >= min_bytes and trim(0))


# Of new objects, how many make the collector run while a program is imported; Python's own number is 700.
_MANY_OBJECTS = 50_000


def collect_rarely() -> None:
    """Until `keep_for_good`: what is imported stays, and to visit it again and again takes a fifth of the time."""
    gc.set_threshold(_MANY_OBJECTS, *_THRESHOLDS[1:])


def keep_for_good() -> None:
    """Freeze all current objects: the collector does not visit them again.

    A full collection starts only when the number of new objects reaches a quarter of the survivors of the last one.
    The last run must therefore happen after the freeze, with almost no survivors. Counted from all frozen objects, that
    quarter is some 20,000 objects, and the reference cycles of a thousand unloaded models would wait for them.
    """
    gc.set_threshold(*_THRESHOLDS)
    gc.collect()
    gc.freeze()
    gc.collect()


_SWITCH_INTERVAL_S = 0.0005


def shorten_switch_interval() -> None:
    """Let a thread that waits for the interpreter's lock request it after 0.5 ms, not after Python's 5 ms.

    The event loop releases the lock for each system call. Beside threads that compute in Python, such as those that
    read long texts, it then waits for one interval per thread to get it back: with 5 ms, a small request with ten
    system calls takes longer than 100 ms. Where threads do not compete, the interval changes nothing.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
