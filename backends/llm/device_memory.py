"""How much memory the KV caches of a device's LLMs may take: their part of the budget that all backends share."""

from __future__ import annotations

import psutil
import torch

from modelserver.backend import DeviceMemory, Reservation
from modelserver.backend import device_memory as budget_of

__all__ = ["DeviceMemory", "Reservation", "available_bytes", "device_memory"]

# Of a CPU's free memory; the rest is for other models, activations and the system.
_CPU_SHARE = 0.4


def device_memory(device: torch.device) -> DeviceMemory:
    """The budget of `device`; a CUDA device without a number is the current one."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return budget_of(str(device))


def available_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """What KV caches may take now: on a GPU its share less what is in use, on a CPU a part of what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - gpu_memory_utilization))
    return int(psutil.virtual_memory().available * _CPU_SHARE)
