"""The NVIDIA GPUs that this process can use, by the numbers that CUDA gives them: those of `instance_group.gpus`.

CUDA numbers the devices in CUDA_VISIBLE_DEVICES from 0; the driver numbers all devices. No CUDA library is used: a
context would take hundreds of megabytes of each device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from modelserver.telemetry.gpu import GPUS, GpuMemory, GpuReading, Gpus

DEVICE_FILES = Path("/dev")
_LIST = "CUDA_VISIBLE_DEVICES"


def visible_devices(num_devices: int, listed: str | None) -> tuple[int | str, ...]:
    """The devices in CUDA's order: the driver's number of each device, or its listed UUID.

    `listed` is CUDA_VISIBLE_DEVICES: it ends at the first device that is missing or listed twice (CUDA's
    programming guide, environment variables).
    """
    if listed is None:
        return tuple(range(num_devices))
    devices: list[int | str] = []
    for word in listed.split(","):
        name = word.strip()
        device: int | str = int(name) if name.isascii() and name.isdecimal() else name
        if isinstance(device, str) and not device.startswith(("GPU-", "MIG-")):
            break
        if device in devices or (isinstance(device, int) and device >= num_devices):
            break
        devices.append(device)
    return tuple(devices) if num_devices else ()


def visible_gpus(
    *, device_files: Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[int | str, ...]:
    """As `visible_devices`, for this machine: its device files give the number of devices."""
    names = (path.name.removeprefix("nvidia") for path in (device_files or DEVICE_FILES).glob("nvidia[0-9]*"))
    return visible_devices(sum(name.isdecimal() for name in names), environment.get(_LIST))


def usable_gpus(
    least_capability: float, *, gpus: Gpus = GPUS, visible: tuple[int | str, ...] | None = None
) -> tuple[int, ...]:
    """CUDA's numbers of the visible GPUs whose compute capability is high enough or unknown."""
    devices = visible_gpus() if visible is None else visible
    if not devices:
        return ()
    readings = gpus.read()
    usable = []
    for number, device in enumerate(devices):
        reading = _find(readings, device)
        capability = reading.compute_capability if reading is not None else None
        if capability is None or capability[0] + capability[1] / 10 >= least_capability:
            usable.append(number)
    return tuple(usable)


def gpu_memory(device_id: int, *, gpus: Gpus = GPUS, visible: tuple[int | str, ...] | None = None) -> GpuMemory | None:
    """Memory of the GPU with this CUDA number; None if unknown."""
    devices = visible_gpus() if visible is None else visible
    if not 0 <= device_id < len(devices):
        return None
    device = devices[device_id]
    if isinstance(device, int):
        return gpus.memory(device)
    reading = _find(gpus.read(), device)
    return None if reading is None else reading.memory


def free_gpu_bytes(device_id: int) -> int | None:
    """A GPU's free memory, not used by any process; None if unknown."""
    memory = gpu_memory(device_id)
    return None if memory is None else memory.free_bytes


def _find(readings: tuple[GpuReading, ...], device: int | str) -> GpuReading | None:
    """The reading of a device by its number, or by the beginning of its UUID."""
    for reading in readings:
        if reading.index == device or (isinstance(device, str) and reading.uuid.startswith(device)):
            return reading
    return None
