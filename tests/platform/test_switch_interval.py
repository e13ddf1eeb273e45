"""How long a thread waits for the interpreter's lock beside one that computes."""

from __future__ import annotations

import subprocess
import sys

# Gives the lock up often beside a thread that computes; prints how long that took.
PROGRAM = """
import threading
import time
from modelserver.core.interpreter import shorten_switch_interval

if {shorten}:
    shorten_switch_interval()
is_over = False

def compute():
    while not is_over:
        pass

threading.Thread(target=compute).start()
began_s = time.perf_counter()
for _ in range(100):
    time.sleep(0)
print(time.perf_counter() - began_s)
is_over = True
"""


def waited_s(*, shorten: bool) -> float:
    program = PROGRAM.format(shorten=shorten)
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def test_a_thread_that_gives_the_lock_up_gets_it_back_soon() -> None:
    assert waited_s(shorten=True) < waited_s(shorten=False) / 2
