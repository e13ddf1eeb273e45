"""The allocator's thresholds: large buffers are reused instead of being given back and faulted in again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

# Frees and takes a 4 MiB buffer often; prints whether malloc was tuned, and the page faults.
PROGRAM = """
import resource
from modelserver.core.interpreter import tune_malloc

tuned = tune_malloc() if {tune} else False
bytearray(4 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    bytearray(b"x") * (4 << 20)
print(tuned, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, tune: bool) -> tuple[bool, int]:
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(tune=tune)], capture_output=True, text=True, check=True
    ).stdout.split()
    return printed[0] == "True", int(printed[1])


def test_large_buffers_no_longer_fault_each_time() -> None:
    is_tuned, faults = page_faults(tune=True)
    if is_tuned:  # the C library is glibc
        assert faults < page_faults(tune=False)[1] / 5


# Frees 200 MiB that lie below something which stays, and prints how much the process holds, before and after.
FREEING = """
import ctypes
import resource
from pathlib import Path
from modelserver.core.interpreter import give_back, tune_malloc

def held_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20

tune_malloc()
blocks = [bytearray(b"x") * (1 << 20) for _ in range(200)]
kept = bytearray(1 << 20)
del blocks
before = held_mib()
print(give_back(), before - held_mib())
"""


def test_much_that_is_free_is_given_back() -> None:
    printed = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, text=True, check=True).stdout.split()
    if printed[0] == "True":
        assert int(printed[1]) > 150
    else:
        assert not hasattr(ctypes.CDLL(None), "mallinfo2")
