"""GPU metrics of a Prometheus page."""

from __future__ import annotations

from modelserver.bench.server_statistics import combine, read_sample

PAGE = """\
# HELP nv_gpu_utilization GPU utilization rate
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{{gpu_uuid="GPU-a"}} {0}
nv_gpu_utilization{{gpu_uuid="GPU-b"}} 0.5
nv_gpu_power_usage{{gpu_uuid="GPU-a"}} 50
nv_gpu_memory_used_bytes{{gpu_uuid="GPU-a"}} {1}
nv_gpu_memory_total_bytes{{gpu_uuid="GPU-a"}} 1000
nv_inference_count{{model="m"}} 3
"""


def test_scrapes_are_averaged_and_memory_is_the_largest() -> None:
    gpu = combine([read_sample(PAGE.format(0.2, 100)), read_sample(PAGE.format(0.4, 300))])
    assert gpu.utilization == {"GPU-a": 0.30000000000000004, "GPU-b": 0.5}
    assert gpu.power_watts == {"GPU-a": 50}
    assert gpu.max_memory_bytes == {"GPU-a": 300}
    assert gpu.total_memory_bytes == {"GPU-a": 1000}


def test_a_server_without_gpus() -> None:
    assert read_sample("nv_inference_count 3\n") == {}
    assert combine([]).utilization == {}
