"""The devices of this machine on which models may be placed."""

from __future__ import annotations

from modelserver.platform.gpus import usable_gpus


def gpu_ids(least_capability: float = 0.0) -> tuple[int, ...]:
    """CUDA's numbers of the NVIDIA GPUs that this process can use, without those of a lower compute capability."""
    return usable_gpus(least_capability)
