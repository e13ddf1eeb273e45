"""Memory in use is gathered into huge pages, and stays what it was."""

from __future__ import annotations

import mmap
from pathlib import Path

from modelserver.platform.huge_pages import use_huge_pages

_HUGE_BYTES = 2 << 20


def _huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


def test_memory_in_use_is_gathered_and_keeps_its_contents() -> None:
    memory = mmap.mmap(-1, 8 * _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pattern = bytes(range(256)) * (_HUGE_BYTES // 256)
    memory.write(pattern * 6)  # the last two stay untouched
    before = _huge_bytes()
    gathered = use_huge_pages()
    assert memory[:] == pattern * 6 + bytes(2 * _HUGE_BYTES)
    assert _huge_bytes() - before <= gathered
    # Whole huge pages of what was written, at whatever address it begins; none where the kernel has no such call.
    assert gathered == 0 or gathered >= 5 * _HUGE_BYTES
