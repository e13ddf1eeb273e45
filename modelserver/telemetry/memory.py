"""Private memory of processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """`kind` is CPU, CPU_PINNED or GPU, `id` the device's."""

    kind: str
    id: int
    byte_size: int


def process_memory(pids: Iterable[int]) -> tuple[MemoryUsage, ...]:
    """The private host memory of these processes: one entry, none without processes.

    Pages of libraries and of tensors in shared memory are not counted, nor processes that have ended.
    """
    sizes = [size for pid in pids if (size := _private_bytes(pid)) is not None]
    return (MemoryUsage("CPU", 0, sum(sizes)),) if sizes else ()


def _private_bytes(pid: int) -> int | None:
    """proc(5): the second number of statm is what is resident, the third what of it is shared; in pages."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):  # it has ended
        return None
    return (int(resident) - int(shared)) * _PAGE_BYTES


def own_memory_bytes() -> int:
    """The private memory of this process; 0 if unknown."""
    return _private_bytes(os.getpid()) or 0
