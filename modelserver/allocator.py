"""Tells glibc's allocator to keep large buffers.

Left alone it gives each buffer over its threshold back to the kernel when freed and page-faults it in
again when the next request needs one: several times the cost of copying a 1 MiB tensor.
"""

from __future__ import annotations

import ctypes
import logging
import sys

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest that glibc takes on 64 bit; buffers above it are mapped, and unmapped when freed.
_MMAP_THRESHOLD_BYTES = 32 << 20
# Free memory kept at the top of the heap.
_TRIM_THRESHOLD_BYTES = 256 << 20


def tune_malloc() -> bool:
    """Raise the thresholds for this process; False where the C library has no mallopt (macOS, musl)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    is_done = bool(
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    )
    logger.debug("malloc keeps buffers of up to %d bytes: %s", _MMAP_THRESHOLD_BYTES, is_done)
    return is_done
