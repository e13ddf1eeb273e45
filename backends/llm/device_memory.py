"""How much memory the KV caches of a device's LLMs may take: one budget that all engines of this process share."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import psutil
import torch

from modelserver.backend import UnavailableError

# Of a CPU's free memory; the rest is for other models, activations and the system.
_CPU_SHARE = 0.4


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory of one engine. `release` gives it back; a second time does nothing."""

    budget: DeviceMemory
    num_bytes: int

    def release(self) -> None:
        self.budget.free(self)


class DeviceMemory:
    """Reservations on one device. Threads that load models share it; the lock guards the sum.

    `is_lazy`: zeroed memory is free until it is touched, as on a CPU; so what is free now has been promised in part.
    """

    def __init__(self, *, is_lazy: bool = True) -> None:
        self._lock = threading.Lock()
        self._is_lazy = is_lazy
        self._reserved = 0

    def reserve(self, wanted: int, *, available: int | None, least: int, what: str) -> Reservation:
        """As much of `wanted` bytes as `available` leaves after the others; None: all of it, because somebody said so.

        Lazy memory is shared with models that come later: nobody gets more than half of what is left, but `least`.
        UnavailableError below `least`.
        """
        with self._lock:
            left = wanted if available is None else available - (self._reserved if self._is_lazy else 0)
            share = max(least, left // 2) if self._is_lazy and available is not None else left
            granted = min(wanted, left, share)
            if granted < least:
                raise UnavailableError(
                    f"{what} needs {least} bytes for its KV cache, and {max(granted, 0)} are left: unload a model, "
                    "or lower max_model_len or kv_cache_memory_bytes"
                )
            self._reserved += granted
            return Reservation(self, granted)

    def free(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved -= reservation.num_bytes
            reservation.num_bytes = 0


# Devices are the process's, so their budgets are too.
_DEVICES: dict[str, DeviceMemory] = {}
_DEVICES_LOCK = threading.Lock()


def device_memory(device: torch.device) -> DeviceMemory:
    with _DEVICES_LOCK:
        return _DEVICES.setdefault(str(device), DeviceMemory(is_lazy=device.type == "cpu"))


def available_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """What KV caches may take now: on a GPU its share less what is in use, on a CPU a part of what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - gpu_memory_utilization))
    return int(psutil.virtual_memory().available * _CPU_SHARE)
