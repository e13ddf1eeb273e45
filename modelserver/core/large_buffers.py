"""Memory for large requests, and for what is made of them.

The first write to a fresh page is slow: the kernel clears the page, and on a virtual machine the host may have to
find it. With huge pages, which NumPy asks for, one byte can cost milliseconds of the event loop. So large buffers
are mapped with small pages, and a freed buffer serves the next requests for some seconds before it is unmapped.
Freeing a `bytes` object of 60 MB costs 10 ms with the interpreter's lock held, as the kernel takes back its pages: long
results lie here too.
"""

from __future__ import annotations

import _thread
import mmap
import sys
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Final

import numpy as np

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]

_ALIGNMENT: Final = 64
# Smaller buffers come from the C library's heap, which keeps freed memory.
_MIN_MAPPED_BYTES: Final = 4 << 20
_MAX_IDLE_BYTES: Final = 256 << 20
_IDLE_S: Final = 5.0
# Linux's flag, which Python names from 3.13 on.
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# Memory that is given back to the system before other threads get a turn: half a millisecond.
_SWEPT_BYTES: Final = 4 << 20
# Bytes that are copied before other threads get a turn.
_COPIED_BYTES: Final = 256 << 10
# Long enough for a thread that waits for the interpreter's lock to get it.
_PAUSE_S: Final = 0.0001
# A part whose pages were never written to is given back in less.
_EMPTY_S: Final = 0.00002
# A message of an announced size gets memory for all of it at once up to the first of these; a longer one once so much
# of it has arrived as the second says, which the event loop copies. An announcement alone costs nothing.
_PROMISED_BYTES: Final = 64 << 20
_PROVEN_BYTES: Final = 1 << 20


class LargeBuffers:
    """Mapped blocks of memory: in use while any view of them lives, then idle for `idle_s`, then unmapped.

    `take` is called from any thread, and views may end in any thread.
    """

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES, idle_s: float = _IDLE_S) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle_s = idle_s
        # The latest last. Taking a block out of the deque is atomic, and the thread that does so owns it.
        self._idle: deque[tuple[float, mmap.mmap]] = deque()
        # By the identities of the references: arrays have no hash.
        self._lent: dict[int, tuple[weakref.ref[Memory], mmap.mmap]] = {}

    @property
    def num_idle_bytes(self) -> int:
        """The memory that is kept for the next requests."""
        return sum(len(block) for _, block in self._idle.copy())

    def take(self, num_bytes: int) -> Memory:
        """At least `num_bytes` of memory with any content."""
        size = -(-num_bytes // _MIN_MAPPED_BYTES) * _MIN_MAPPED_BYTES
        block = self._find(size)
        if block is None:
            # Pages count once they are written to: a message that is announced may never arrive.
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        memory = np.frombuffer(block, np.uint8)
        lent = weakref.ref(memory, self._give_back)
        self._lent[id(lent)] = lent, block
        return memory

    def _find(self, size: int) -> mmap.mmap | None:
        """An idle block of at least that size, but not much larger."""
        for entry in reversed(self._idle.copy()):
            if size <= len(entry[1]) <= 2 * size:
                try:
                    self._idle.remove(entry)
                except ValueError:  # another thread has it
                    continue
                return entry[1]
        return None

    def _give_back(self, lent: weakref.ref[Memory]) -> None:
        self._idle.append((time.monotonic(), self._lent.pop(id(lent))[1]))
        self._trim(self._max_idle_bytes)

    def _trim(self, max_bytes: int) -> None:
        while self._idle and self.num_idle_bytes > max_bytes:
            try:
                _, block = self._idle.popleft()
            except IndexError:
                return
            with suppress(RuntimeError):  # there can be no thread: it is unmapped here
                _thread.start_new_thread(_unmap, (block,))

    def is_due(self) -> bool:
        """Whether a block has been idle for long enough to be unmapped."""
        idle = self._idle.copy()
        return bool(idle) and time.monotonic() - idle[0][0] >= self._idle_s

    def sweep(self) -> None:
        """Unmap the blocks that have been idle for long. That takes milliseconds: do not call it on the event loop."""
        while self.is_due():
            try:
                _, block = self._idle.popleft()
            except IndexError:
                return
            _unmap(block)


def _unmap(block: mmap.mmap) -> None:
    """Give the pages of a block back, and let other threads run after each part that had some."""
    for start in range(0, len(block), _SWEPT_BYTES):
        began_s = time.perf_counter()
        with suppress(OSError):
            block.madvise(mmap.MADV_DONTNEED, start, min(_SWEPT_BYTES, len(block) - start))
        if time.perf_counter() - began_s > _EMPTY_S:
            time.sleep(_PAUSE_S)


LARGE_BUFFERS: Final = LargeBuffers()


def scratch(num_bytes: int) -> memoryview:
    """`num_bytes` of memory with any content."""
    return np.empty(num_bytes, np.uint8).data if num_bytes < _MIN_MAPPED_BYTES else _taken(num_bytes)


def _taken(num_bytes: int) -> memoryview:
    return LARGE_BUFFERS.take(num_bytes).data[:num_bytes]


def prepare_heap(num_bytes: int) -> None:
    """Let the heap of this thread have memory for an object of that size whose pages are there.

    One call that makes a long string, and holds the interpreter's lock, then need not wait for the kernel to clear
    each page, which takes five times as long as the copy itself.
    """
    if num_bytes > _COPIED_BYTES:
        memory = np.empty(num_bytes, np.uint8)
        for start in range(0, num_bytes, _COPIED_BYTES):
            memory[start : start + _COPIED_BYTES] = 0


def joined(parts: list[bytes]) -> bytes | memoryview:
    """The parts as one buffer; empties `parts`. A join of a large one would hold the interpreter's lock for long."""
    size = sum(map(len, parts))
    if size < _MIN_MAPPED_BYTES:
        return b"".join(parts)
    memory = np.frombuffer(scratch(size), np.uint8)
    end = size
    while parts:
        part = parts.pop()
        start = end - len(part)
        for at in range(0, len(part), _COPIED_BYTES):
            piece = np.frombuffer(part, np.uint8, min(_COPIED_BYTES, len(part) - at), at)
            memory[start + at : start + at + len(piece)] = piece
        end = start
    return memory.data


def reserved_bytes(size: int, num_arrived: int) -> int:
    """How much memory a message of announced `size` gets when `num_arrived` bytes of it are there or come now."""
    return size if size <= _PROMISED_BYTES or num_arrived > _PROVEN_BYTES else _PROVEN_BYTES


def aligned_buffer(num_bytes: int, aligned_at: int) -> memoryview:
    """`num_bytes` of memory with any content, whose address at `aligned_at` is a multiple of 64."""
    size = num_bytes + _ALIGNMENT
    memory = np.empty(size, np.uint8) if size < _MIN_MAPPED_BYTES else LARGE_BUFFERS.take(size)
    padding = -(memory.ctypes.data + aligned_at) % _ALIGNMENT
    return memory.data[padding : padding + num_bytes]
