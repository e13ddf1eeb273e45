"""How many threads compute for an instance: PyTorch's number belongs to the thread that calls, and is kept there.

`torch.set_num_threads` sets the calling thread's number, and that with which later threads begin (OpenMP's nthreads
variable). Each instance is called by a thread of its own, so each can have its own number.
"""

from __future__ import annotations

import logging
import threading

import torch

log = logging.getLogger(__name__)

# What PyTorch chose when it was imported, before any model said anything.
_DEFAULT = torch.get_num_threads()
_here = threading.local()


def use_threads(count: int) -> None:
    """Let what this thread computes use so many threads from here on; 0: as many as PyTorch chose by itself."""
    if getattr(_here, "count", -1) != count:
        torch.set_num_threads(count or _DEFAULT)
        _here.count = count


def set_interop_threads(model_name: str, count: int) -> None:
    """Set the process's threads between operators, which can be done once: a warning says that it was too late."""
    if count <= 0 or count == torch.get_num_interop_threads():
        return
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        log.warning(
            "model '%s': INTER_OP_THREAD_COUNT %d comes too late: PyTorch sets it once per process, to %d",
            model_name,
            count,
            torch.get_num_interop_threads(),
        )
