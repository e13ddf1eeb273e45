"""What the steps of `tests/gpu` call of `torch.cuda`, on a machine without a GPU: nothing is asynchronous there."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch


class Event:
    """A moment."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._has_timing = enable_timing
        self._recorded_s: float | None = None

    def record(self) -> None:
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self._has_timing, "an event of a GPU has a time only if it was asked for"
        assert end._has_timing, "an event of a GPU has a time only if it was asked for"
        assert self._recorded_s is not None, "the event was not recorded"
        assert end._recorded_s is not None, "the event was not recorded"
        return (end._recorded_s - self._recorded_s) * 1e3


def install() -> None:
    """For the rest of this process. `torch.cuda.is_available` goes on to tell the truth."""
    fakes = {
        "Event": Event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _device: SimpleNamespace(multi_processor_count=4),
        "mem_get_info": lambda _device=0: (1 << 30, 2 << 30),
        "memory_reserved": lambda: 1 << 20,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
