"""The turn to capture a CUDA graph. One process has one, whatever its models and libraries are."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_capturing = threading.Lock()


@contextlib.contextmanager
def capture_turn() -> Iterator[None]:
    """No other thread captures meanwhile, and no garbage is collected.

    Captures of one process share the state of torch's allocator, and some begin by waiting for the whole device, which
    breaks the capture of another thread. A collection could destroy what belongs to the device, which is an error
    during a capture.
    """
    with _capturing:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
