"""Refuses to load models on GPUs that are too full: --model-load-gpu-limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from modelserver.backend import DeviceKind
from modelserver.errors import UnavailableError
from modelserver.execution.placement import InstancePlan
from modelserver.platform.gpus import gpu_memory
from modelserver.telemetry.gpu import GpuMemory


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """By device the share of its memory above which nothing is loaded there. `memory_of` tells how full it is."""

    shares: Mapping[int, float] = field(default_factory=dict)
    memory_of: Callable[[int], GpuMemory | None] = gpu_memory

    def check(self, model_name: str, plans: Iterable[InstancePlan]) -> None:
        """Raise UnavailableError if a GPU that the instances are to be on is fuller than it may be.

        A GPU of which nobody can tell how full it is counts as full: the limit would mean nothing else.
        """
        on_gpus = {plan.placement.device_id for plan in plans if plan.placement.kind is DeviceKind.GPU}
        for device in sorted(on_gpus & self.shares.keys()):
            limit = self.shares[device]
            memory = self.memory_of(device)
            flag = f"--model-load-gpu-limit={device}:{limit:g}"
            if memory is None:
                raise UnavailableError(
                    f"model '{model_name}': {flag}, and nobody can tell how full GPU {device} is: "
                    "pip install nvidia-ml-py"
                )
            used = memory.used_bytes / max(1, memory.total_bytes)
            if used > limit:
                raise UnavailableError(
                    f"model '{model_name}': {used:.0%} of the memory of GPU {device} is in use, which is over {flag}: "
                    "unload a model, or raise the limit"
                )
