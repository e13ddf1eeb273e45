from __future__ import annotations

import os
import subprocess
import sys

from modelserver.telemetry.host import process_memory

_HOLD = "import sys; held = b'x' * int(sys.argv[1]); print(flush=True); sys.stdin.read()"


def test_what_a_process_holds_is_counted() -> None:
    size = 32 << 20
    command = [sys.executable, "-c", _HOLD, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (alone,) = process_memory([process.pid])
        (both,) = process_memory([process.pid, os.getpid()])
    assert (alone.kind, alone.id) == ("CPU", 0)
    assert size < alone.byte_size < both.byte_size


def test_a_process_that_is_gone_holds_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert process_memory([process.pid]) == ()
    assert process_memory([]) == ()
