"""Reservations of device memory: one budget per device for all backends of this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from modelserver.errors import UnavailableError

_ADVICE = "unload a model, or place this one on another device"


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory reserved for one model. `release` returns it; a second call does nothing.

    `is_settled`: it has been allocated, so that the device's own figures show it.
    """

    budget: DeviceMemory
    num_bytes: int
    is_settled: bool = False

    def settle(self) -> None:
        """Mark the memory as allocated: from now on the device's own figures include it."""
        self.budget.settle(self)

    def release(self) -> None:
        self.budget.free(self)


class DeviceMemory:
    """Reservations on one device. Threads that load models share it; the lock guards the sums.

    `is_lazy`: zeroed memory is free until it is touched, as on a CPU; so a part of the free memory is already reserved,
    even by settled reservations.
    """

    def __init__(self, *, is_lazy: bool = True) -> None:
        self._lock = threading.Lock()
        self._is_lazy = is_lazy
        self._reserved = 0
        self._unsettled = 0

    @property
    def reserved_bytes(self) -> int:
        """The sum of all reservations."""
        return self._reserved

    def reserve(
        self,
        wanted: int,
        *,
        available: int | None,
        least: int,
        enough: int | None = None,
        what: str,
        purpose: str = "",
        advice: str = _ADVICE,
    ) -> Reservation:
        """Reserve as much of `wanted` bytes as `available` allows after the others; None: all, as configured.

        Lazy memory is shared with later models: each gets at most half of the rest. When most is reserved
        but unused, a model still gets `enough`, as far as it is free.
        Raises UnavailableError if less than `least` is left. Its text names `what` needs the memory, the `purpose`
        (such as ` for its weights`) and the `advice`.
        """
        with self._lock:
            promised = self._reserved if self._is_lazy else self._unsettled
            left = wanted if available is None else available - promised
            if self._is_lazy and available is not None:
                left = max(left // 2, min(max(least, enough or 0), available))
            granted = min(wanted, left)
            if granted < least:
                raise UnavailableError(f"{what} needs {least} bytes{purpose}, and {max(granted, 0)} are left: {advice}")
            self._reserved += granted
            self._unsettled += granted
            return Reservation(self, granted)

    def settle(self, reservation: Reservation) -> None:
        with self._lock:
            if not reservation.is_settled:
                reservation.is_settled = True
                self._unsettled -= reservation.num_bytes

    def free(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved -= reservation.num_bytes
            if not reservation.is_settled:
                self._unsettled -= reservation.num_bytes
            reservation.num_bytes = 0


# Devices are shared by the whole process, so their budgets are too.
_DEVICES: dict[str, DeviceMemory] = {}
_DEVICES_LOCK = threading.Lock()


def device_memory(device: str) -> DeviceMemory:
    """The budget of a device by its name: `cpu`, or `cuda:0`, `cuda:1`, …"""
    with _DEVICES_LOCK:
        return _DEVICES.setdefault(device, DeviceMemory(is_lazy=device.startswith("cpu")))
