"""The device memory that the contexts of an instance take beside the engine's weights: scratch space for its layers.

It is promised out of the device's budget before the contexts are made, so that what does not fit is told at load.
"""

from __future__ import annotations

from typing import Any

from modelserver.backend import Reservation, device_memory

from .engine import LoadedEngine
from .instance_settings import InstanceSettings

_PER_PROFILE = "ON_PROFILE_CHANGE"


def scratch_bytes(loaded: LoadedEngine, settings: InstanceSettings) -> int:
    """What TensorRT allocates for a context of each profile, and what all CUDA graphs of the instance share."""
    engine: Any = loaded.engine
    largest = int(engine.device_memory_size_v2)
    if settings.allocation_strategy == _PER_PROFILE:
        contexts = sum(int(engine.get_device_memory_size_for_profile_v2(profile)) for profile in settings.profiles)
    else:
        contexts = largest * len(settings.profiles)
    has_graphs = bool(settings.graphs) and not loaded.captures_by_itself
    return contexts + (largest if has_graphs else 0)


def reserve_scratch(loaded: LoadedEngine, settings: InstanceSettings, *, name: str) -> Reservation:
    """Raises UnavailableError when the device has not that much left."""
    num_bytes = scratch_bytes(loaded, settings)
    return device_memory(loaded.device.name).reserve(
        num_bytes,
        available=loaded.device.free_bytes(),
        least=num_bytes,
        what=f"instance '{name}' on {loaded.device.name}",
        purpose=" for its execution contexts",
        advice="list fewer profiles, fewer instances or no CUDA graphs, build the engine with smaller profiles, or "
        "unload a model",
    )
