"""NVIDIA's management library without a driver."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any


class NotSupportedError(Exception):
    """What an NVML raises."""


class Nvml:
    """The part of pynvml that is asked, with GPUs of our own: (memory used of 100, compute capability)."""

    NVMLError = NotSupportedError

    def __init__(self, *gpus: tuple[int, tuple[int, int]], starts: bool = True) -> None:
        self.gpus = gpus
        self.starts = starts
        self.num_asked = 0

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's name
        if not self.starts:
            raise NotSupportedError("Driver Not Loaded")

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=100, used=self.gpus[index][0]),
            "nvmlDeviceGetCudaComputeCapability": lambda index: self.gpus[index][1],
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}abc".encode(),
            "nvmlDeviceGetName": lambda index: f"card {index}",
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=25),
            "nvmlDeviceGetPowerUsage": lambda _: 70_500,
            "nvmlDeviceGetTotalEnergyConsumption": lambda _: 2_000,
        }
        self.num_asked += 1

        def refuse(_: object) -> None:
            raise NotSupportedError("Not Supported")

        return answers.get(name, refuse)


def install() -> None:
    """Let the rest of this process find one GPU."""
    from modelserver.telemetry import gpu

    gpu.DEVICE_FILES = Path(mkdtemp(prefix="modelserver-devices-"))
    (gpu.DEVICE_FILES / "nvidia0").touch()
    sys.modules["pynvml"] = Nvml((50, (9, 0)))  # type: ignore[assignment]
