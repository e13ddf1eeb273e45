"""Huge pages for memory that is read over and over, such as the weights of a model."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_MADV_COLLAPSE = 25
_PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20
_PAGES = _HUGE_BYTES // _PAGE_BYTES
# Of a huge page, the pages that must be in memory already, so that what is gathered takes hardly more memory.
_LEAST_PRESENT = _PAGES * 15 // 16


def use_huge_pages() -> int:
    """Gather private memory of this process that is in use into huge pages; returns the bytes that are in such pages.

    A loop over weights reads them a third faster then, since the processor's tables cover more memory and it reads
    ahead across more than 4 KiB. Contents and addresses stay as they are, and no page of a file is touched. The system
    copies what it gathers, some 0.1 s for 100 MiB, so call this at the end of a load, from any thread. 0 where the
    kernel cannot do it: before Linux 6.1, without huge pages, or on another system.
    """
    library = _c_library()
    if library is None:
        return 0
    gathered = 0
    for first in _windows(library):
        if library.madvise(first, _HUGE_BYTES, _MADV_COLLAPSE) == 0:
            gathered += _HUGE_BYTES
        elif not gathered:  # A kernel that can do it has memory for the first, unless there is hardly any left.
            return 0
    logger.debug("%.0f MiB of memory are in huge pages", gathered / (1 << 20))
    return gathered


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return library


def _windows(library: ctypes.CDLL) -> Iterator[int]:
    """Addresses of memory of the size of a huge page that is in use."""
    for start, stop in _private_memory():
        present = ctypes.create_string_buffer((stop - start) // _PAGE_BYTES)
        if library.mincore(start, stop - start, present) != 0:
            continue  # another thread has unmapped it meanwhile
        states = present.raw
        for window in range((stop - start) // _HUGE_BYTES):
            pages = states[window * _PAGES : (window + 1) * _PAGES]
            if _PAGES - pages.count(0) >= _LEAST_PRESENT:
                yield start + window * _HUGE_BYTES


def _private_memory() -> Iterator[tuple[int, int]]:
    """Writable mappings without a file, as far as huge pages fit into them."""
    for line in _MAPS.read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if not access.startswith("rw") or access[3] != "p" or inode != "0" or name not in ([], ["[heap]"]):
            continue
        start, stop = (int(address, 16) for address in addresses.split("-"))
        start, stop = -(-start // _HUGE_BYTES) * _HUGE_BYTES, stop // _HUGE_BYTES * _HUGE_BYTES
        if start < stop:
            yield start, stop
