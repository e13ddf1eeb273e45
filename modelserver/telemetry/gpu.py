"""NVIDIA GPUs as the driver's management library (NVML) sees them: their names, memory, load and power;
and those that this process can use, by CUDA's numbers (`instance_group.gpus`).

Through the optional package nvidia-ml-py (`pynvml`). Without it, or without a driver, no GPUs are reported.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from prometheus_client.core import Metric


logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU, of all processes."""

    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU now; values that it does not report are None. `utilization` is the share of the last sample
    time, 0 to 1, in which a kernel ran; power in watts, `energy_j` since the driver was loaded.
    """

    index: int
    uuid: str
    name: str
    memory: GpuMemory | None
    utilization: float | None
    power_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    compute_capability: tuple[int, int] | None


class Gpus:
    """All GPUs of the machine, by the numbers that the driver gives them. Any thread.

    `library` is the module pynvml, or something like it; None looks for it.
    """

    def __init__(self, library: Any = None) -> None:
        self._lock = threading.Lock()  # guards the first use
        self._library = library
        self._handles: list[Any] | None = None

    @property
    def count(self) -> int:
        """The number of GPUs; 0 if unknown."""
        return len(self._open())

    def memory(self, index: int) -> GpuMemory | None:
        """None for an unknown GPU, or without the library."""
        handles = self._open()
        if not 0 <= index < len(handles):
            return None
        info = self._ask(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handles[index]))
        return None if info is None else GpuMemory(int(info.total), int(info.used))

    def read(self) -> tuple[GpuReading, ...]:
        """Every GPU now. A few milliseconds each."""
        return tuple(self._read(index, handle) for index, handle in enumerate(self._open()))

    def _read(self, index: int, handle: Any) -> GpuReading:
        rates = self._ask(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(handle))
        capability = self._ask(lambda nvml: nvml.nvmlDeviceGetCudaComputeCapability(handle))
        return GpuReading(
            index=index,
            uuid=_text(self._ask(lambda nvml: nvml.nvmlDeviceGetUUID(handle))) or f"gpu-{index}",
            name=_text(self._ask(lambda nvml: nvml.nvmlDeviceGetName(handle))),
            memory=self.memory(index),
            utilization=None if rates is None else rates.gpu / 100,
            power_w=_thousandth(self._ask(lambda nvml: nvml.nvmlDeviceGetPowerUsage(handle))),
            power_limit_w=_thousandth(self._ask(lambda nvml: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
            energy_j=_thousandth(self._ask(lambda nvml: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))),
            compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        )

    def _ask(self, question: Callable[[Any], _Value]) -> _Value | None:
        """The value; None if this GPU does not report it, such as parts of a GPU (MIG) and older GPUs."""
        try:
            return question(self._library)
        except self._library.NVMLError:
            return None

    def _open(self) -> list[Any]:
        with self._lock:
            if self._handles is None:
                self._handles = self._find()
            return self._handles

    def _find(self) -> list[Any]:
        if self._library is None:
            try:
                self._library = importlib.import_module("pynvml")
            except ImportError:
                return []
        nvml = self._library
        try:
            nvml.nvmlInit()
            return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:  # no driver, no device, no permission
            logger.info("no GPU is reported: %s", error)
            return []


class GpuGauges:
    """Readings at most once per interval. Not thread-safe: one reader."""

    def __init__(
        self, interval_s: float, gpus: Gpus | None = None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._gpus = gpus or GPUS
        self._monotonic = monotonic
        self._readings: tuple[GpuReading, ...] = ()
        self._due_s = -float("inf")

    def read(self) -> tuple[GpuReading, ...]:
        """The newest readings, taken now unless the last ones are younger than the interval."""
        now_s = self._monotonic()
        if now_s >= self._due_s:
            self._readings = self._gpus.read()
            self._due_s = now_s + self._interval_s
        return self._readings

    def families(self) -> list[Metric]:
        """The families of the newest readings."""
        return gpu_families(self.read())


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


# Shared by the whole process.
GPUS = Gpus()


# GPU readings as metrics, by the names and labels of Triton's.
_Pick = Callable[[GpuReading], float | None]

_FAMILIES: tuple[tuple[str, str, str, _Pick], ...] = (
    ("nv_gpu_utilization", "gauge", "Share of time in which the GPU computed, 0.0 to 1.0", lambda gpu: gpu.utilization),
    (
        "nv_gpu_memory_total_bytes",
        "gauge",
        "Memory of the GPU, in bytes",
        lambda gpu: gpu.memory.total_bytes if gpu.memory is not None else None,
    ),
    (
        "nv_gpu_memory_used_bytes",
        "gauge",
        "Memory of the GPU in use by any process, in bytes",
        lambda gpu: gpu.memory.used_bytes if gpu.memory is not None else None,
    ),
    ("nv_gpu_power_usage", "gauge", "Power that the GPU takes, in watts", lambda gpu: gpu.power_w),
    ("nv_gpu_power_limit", "gauge", "Power that the GPU may take, in watts", lambda gpu: gpu.power_limit_w),
    ("nv_energy_consumption", "counter", "Energy that the GPU took, in joules", lambda gpu: gpu.energy_j),
)


def gpu_families(readings: Sequence[GpuReading]) -> list[Metric]:
    """The families of the GPUs, with samples for the values that each reports; none without GPUs."""
    from prometheus_client.core import Metric  # not at the top: workers ask for the memory too, and make no pages

    families = []
    for name, kind, text, pick in _FAMILIES if readings else ():
        metric = Metric(name, text, kind)
        for reading in readings:
            value = pick(reading)
            if value is not None:
                metric.add_sample(name, {"gpu_uuid": reading.uuid}, value)
        families.append(metric)
    return families


DEVICE_FILES = Path("/dev")
_LIST = "CUDA_VISIBLE_DEVICES"


def visible_devices(num_devices: int, listed: str | None) -> tuple[int | str, ...]:
    """The devices in CUDA's order: the driver's number of each device, or its listed UUID.

    CUDA numbers the listed devices from 0; the driver numbers all devices. No CUDA library is asked: a context would
    take hundreds of megabytes of each device.

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
