"""Memory that two processes share without a name in a file system, and which of them may use which part of it.

One process writes (it owns the `Arena`), the other reads views (`Leases`). The kernel frees the memory when the last
descriptor and mapping are gone, however the processes ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from collections import deque
from typing import Any

import numpy as np

ALIGNMENT = 64
_PAGE_BYTES = mmap.PAGESIZE
# An arena keeps this much memory for good; more is given back when it is no longer used.
_KEPT_BYTES = 4 << 20
# After this many allocations an arena compares the memory that it holds with what it needs.
_TRIM_WINDOW = 512
# Memory that is given back at once: about a millisecond of the event loop.
_DISCARDED_BYTES = 4 << 20

ByteView = np.ndarray[Any, np.dtype[np.uint8]]


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of tensors, one cache line."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class SharedBuffer:
    """A memfd and this process's mapping of it. It only ever grows, so no view can lose its memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapping: mmap.mmap | None = None
        self._mapped_bytes = 0

    @classmethod
    def create(cls, name: str) -> SharedBuffer:
        """A new, empty buffer; `name` shows in /proc/<pid>/maps only."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A reader whose pages were truncated away would die of SIGBUS. F_SEAL_SEAL: no process may add further seals.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(fd)

    @property
    def nbytes(self) -> int:
        """Bytes mapped in this process."""
        return self._mapped_bytes

    def size(self) -> int:
        """The length of the buffer in bytes, whichever process made it grow."""
        return os.fstat(self.fd).st_size

    def grow(self, nbytes: int) -> None:
        """Make the buffer at least `nbytes` long. Raises OSError when there is no memory for it."""
        os.ftruncate(self.fd, nbytes)
        self._map()

    def view(self, offset: int, nbytes: int) -> ByteView:
        """Bytes of the buffer; the array and everything made from it keep the mapping alive."""
        if offset + nbytes > self._mapped_bytes:
            self._map()
        assert self._mapping is not None, "view of an empty buffer"
        return np.frombuffer(self._mapping, np.uint8, nbytes, offset)

    def discard(self, start: int, end: int) -> None:
        """Give the pages between two page-aligned offsets back to the system; they read as zeros from now on."""
        if self._mapping is not None and end > start:
            self._mapping.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Forget the memory; views that are still alive keep theirs."""
        self._mapping = None
        self._mapped_bytes = 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _map(self) -> None:
        nbytes = os.fstat(self.fd).st_size
        self._mapping = mmap.mmap(self.fd, nbytes)
        self._mapped_bytes = nbytes


class Arena:
    """Hands out parts of a `SharedBuffer` (leases, named by their offset), first fit, so that use stays low and warm.

    Used by one thread at a time.
    """

    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self._leases: dict[int, int] = {}  # offset -> end
        self._gaps: list[tuple[int, int]] = []  # free (start, end), ascending, never adjacent
        self._touched_end = 0  # pages beyond this were never written, or were given back
        self._window_end = 0  # the highest end of a lease in this window
        self._window_count = 0

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def allocate(self, nbytes: int) -> int:
        """The offset of `nbytes` (at least 1), reserved until `free`."""
        assert nbytes > 0, "an empty lease has no offset of its own"
        nbytes = align(nbytes)
        offset = self._take_gap(nbytes)
        end = offset + nbytes
        self._leases[offset] = end
        self._touched_end = max(self._touched_end, end)
        self._window_end = max(self._window_end, end)
        self._window_count += 1
        if self._window_count >= _TRIM_WINDOW and not self._discard_above(self._window_end):
            self._window_end = max(self._leases.values())
            self._window_count = 0
        return offset

    def free(self, offset: int) -> None:
        """End a lease."""
        start, end = offset, self._leases.pop(offset)
        gaps = []
        for gap_start, gap_end in self._gaps:
            if gap_end == start:
                start = gap_start
            elif gap_start == end:
                end = gap_end
            else:
                gaps.append((gap_start, gap_end))
        gaps.append((start, end))
        gaps.sort()
        self._gaps = gaps

    def trim(self) -> bool:
        """Give back memory above the live leases, when there is no traffic; whether there is more to give back."""
        return self._discard_above(0)

    def _take_gap(self, nbytes: int) -> int:
        for index, (start, end) in enumerate(self._gaps):
            if end - start > nbytes:
                self._gaps[index] = (start + nbytes, end)
                return start
            if end - start == nbytes:
                del self._gaps[index]
                return start
        self._extend(nbytes)
        return self._take_gap(nbytes)

    def _extend(self, nbytes: int) -> None:
        old = self.buffer.nbytes
        wanted = max(old + nbytes, old + old // 2, 1 << 20)
        new = -(-wanted // _PAGE_BYTES) * _PAGE_BYTES
        self.buffer.grow(new)
        self._leases[old] = new
        self.free(old)  # joins the gap before it, if there is one

    def _discard_above(self, end: int) -> bool:
        """Free pages above `end` if they are worth a system call, the highest first; whether there are more to free."""
        live_end = max(self._leases.values(), default=0)
        keep = -(-max(end, live_end, _KEPT_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        if self._touched_end > keep + keep // 2:
            discarded_end = min(self.buffer.nbytes, -(-self._touched_end // _PAGE_BYTES) * _PAGE_BYTES)
            self._touched_end = max(keep, discarded_end - _DISCARDED_BYTES)
            self.buffer.discard(self._touched_end, discarded_end)
        return self._touched_end > keep + keep // 2


class _LeaseRef(weakref.ref[ByteView]):
    """Watches the root array of one lease of the peer's arena."""

    __slots__ = ("offset",)
    offset: int


class Leases:
    """Leases of the peer's arena. Views are made by one thread at a time; the last array may die on any thread."""

    def __init__(self, incoming: SharedBuffer) -> None:
        self._incoming = incoming
        self._roots: dict[int, _LeaseRef] = {}
        self._returned: deque[int] = deque()  # leases that this side is done with

    def view(self, offset: int, nbytes: int) -> ByteView:
        """The bytes of a lease; it is returned when this array and all that are made from it are dead."""
        root = self._incoming.view(offset, nbytes)
        watch = _LeaseRef(root, self._on_root_dead)
        watch.offset = offset
        self._roots[offset] = watch
        return root

    @property
    def has_returned(self) -> bool:
        """Whether there are dead leases that were not returned to the peer."""
        return bool(self._returned)

    @property
    def num_returned(self) -> int:
        """Dead leases that were not returned to the peer."""
        return len(self._returned)

    @property
    def num_alive(self) -> int:
        """Leases with arrays that are alive here."""
        return len(self._roots)

    def take_returned(self) -> list[int]:
        """The leases that died since the last call. The peer may reuse them once it is told."""
        if not self._returned:
            return []
        count = len(self._returned)
        return [self._returned.popleft() for _ in range(count)]

    def peek(self, number: struct.Struct) -> int:
        """A number at the start of the peer's memory; 0 when there is no memory yet."""
        if self._incoming.size() < number.size:
            return 0
        value: int = number.unpack_from(self._incoming.view(0, number.size).data)[0]
        return value

    def close(self) -> None:
        """Close the descriptor; arrays that are alive stay valid."""
        self._incoming.close()

    def _on_root_dead(self, watch: weakref.ref[ByteView]) -> None:
        # Runs on any thread. Forget the lease before it is returned, because the peer may reuse the offset at once.
        assert isinstance(watch, _LeaseRef)
        self._roots.pop(watch.offset, None)
        self._returned.append(watch.offset)
