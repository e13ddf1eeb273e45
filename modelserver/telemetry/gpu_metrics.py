"""GPU readings as metrics, by the names and labels of Triton's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client.metrics_core import Metric

from modelserver.telemetry.gpu import GpuReading

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
    families = []
    for name, kind, text, pick in _FAMILIES if readings else ():
        metric = Metric(name, text, kind)
        for reading in readings:
            value = pick(reading)
            if value is not None:
                metric.add_sample(name, {"gpu_uuid": reading.uuid}, value)
        families.append(metric)
    return families
