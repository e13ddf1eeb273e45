"""Which GPUs there are, by which numbers, and what is read of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_nvml import Nvml

from modelserver.backend import DeviceKind, Placement
from modelserver.config.resources import parse_gpu_limits
from modelserver.config.schema import ModelInstanceGroup
from modelserver.errors import InvalidArgumentError, UnavailableError
from modelserver.execution.placement import InstancePlan
from modelserver.execution.shared_resources import GpuLimits
from modelserver.telemetry.gpu import (
    GpuGauges,
    GpuMemory,
    Gpus,
    gpu_families,
    gpu_memory,
    usable_gpus,
    visible_devices,
    visible_gpus,
)


@pytest.mark.parametrize(
    ("num_devices", "listed", "expected"),
    [
        (0, None, ()),
        (3, None, (0, 1, 2)),
        (3, "2,0", (2, 0)),
        (3, "", ()),
        (3, " 1 ", (1,)),
        (3, "1,9,0", (1,)),  # CUDA stops at the first that is not there
        (3, "1,1", (1,)),
        (3, "-1,0", ()),
        (3, "NoDevFiles", ()),
        (2, "GPU-8a,MIG-3", ("GPU-8a", "MIG-3")),
        (0, "GPU-8a", ()),
    ],
)
def test_devices_are_numbered_as_cuda_does(num_devices: int, listed: str | None, expected: tuple[object, ...]) -> None:
    assert visible_devices(num_devices, listed) == expected


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia1", "nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia1x", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(device_files=tmp_path, environment={}) == (0, 1, 2)
    assert visible_gpus(device_files=tmp_path, environment={"CUDA_VISIBLE_DEVICES": "1"}) == (1,)


def test_gpus_of_a_low_capability_are_left_alone() -> None:
    gpus = Gpus(Nvml((0, (5, 2)), (0, (9, 0)), (0, (6, 0))))
    assert usable_gpus(6.0, gpus=gpus, visible=(0, 1, 2)) == (1, 2)
    assert usable_gpus(6.1, gpus=gpus, visible=(2, 1)) == (1,)
    assert usable_gpus(6.0, gpus=gpus, visible=("GPU-1a", "GPU-0a", "MIG-7")) == (0, 2), "one that is not known stays"
    assert usable_gpus(6.0, gpus=Gpus(Nvml(starts=False)), visible=(0, 1)) == (0, 1)
    assert usable_gpus(6.0, gpus=gpus, visible=()) == ()


def test_memory_is_that_of_cudas_number() -> None:
    gpus = Gpus(Nvml((10, (9, 0)), (70, (9, 0))))
    assert gpu_memory(0, gpus=gpus, visible=(1,)) == GpuMemory(100, 70)
    assert gpu_memory(1, gpus=gpus, visible=("MIG-1", "GPU-0a")) == GpuMemory(100, 10)
    assert gpu_memory(1, gpus=gpus, visible=(1,)) is None
    assert gpu_memory(0, gpus=Gpus(Nvml(starts=False)), visible=(0,)) is None


def test_what_a_gpu_does_not_tell_is_none() -> None:
    (reading,) = Gpus(Nvml((10, (9, 0)))).read()
    assert (reading.uuid, reading.name, reading.utilization) == ("GPU-0abc", "card 0", 0.25)
    assert (reading.power_w, reading.power_limit_w, reading.energy_j) == (70.5, None, 2)
    assert reading.memory is not None
    assert reading.memory.free_bytes == 90


def test_gauges_are_read_once_per_interval() -> None:
    nvml, now_s = Nvml((10, (9, 0))), [0.0]
    gauges = GpuGauges(5, Gpus(nvml), monotonic=lambda: now_s[0])
    first = gauges.read()
    num_asked = nvml.num_asked
    now_s[0] = 4.9
    assert gauges.read() is first
    assert nvml.num_asked == num_asked
    now_s[0] = 5
    assert gauges.read() is not first


def test_without_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert Gpus().count == 0


def test_metrics_have_tritons_names() -> None:
    families = {family.name: family for family in gpu_families(Gpus(Nvml((10, (9, 0)), (20, (9, 0)))).read())}
    assert list(families) == [
        "nv_gpu_utilization",
        "nv_gpu_memory_total_bytes",
        "nv_gpu_memory_used_bytes",
        "nv_gpu_power_usage",
        "nv_gpu_power_limit",
        "nv_energy_consumption",
    ]
    used = families["nv_gpu_memory_used_bytes"]
    assert [(sample.labels, sample.value) for sample in used.samples] == [
        ({"gpu_uuid": "GPU-0abc"}, 10),
        ({"gpu_uuid": "GPU-1abc"}, 20),
    ]
    assert not families["nv_gpu_power_limit"].samples, "nobody knows it"
    assert gpu_families(()) == []


def plans_on(*devices: int) -> list[InstancePlan]:
    group = ModelInstanceGroup("g")
    return [InstancePlan(Placement("i", DeviceKind.GPU, device), group) for device in devices]


def test_nothing_is_loaded_on_a_gpu_that_is_too_full() -> None:
    memory = {0: GpuMemory(100, 80), 1: GpuMemory(100, 81)}
    limits = GpuLimits({0: 0.8, 1: 0.8, 2: 1.0}, memory.get)
    limits.check("m", [*plans_on(0, 3), InstancePlan(Placement("cpu", device_id=1), ModelInstanceGroup("g"))])
    with pytest.raises(
        UnavailableError, match=r"model 'm': 81% of the memory of GPU 1 .* over --model-load-gpu-limit=1:0.8"
    ):
        limits.check("m", plans_on(0, 1))
    with pytest.raises(UnavailableError, match="the memory use of GPU 2 is unknown"):
        limits.check("m", plans_on(2))


def test_limits_are_parsed() -> None:
    assert parse_gpu_limits(["0:0.8", "1:1"]) == {0: 0.8, 1: 1.0}


@pytest.mark.parametrize("texts", [["0"], ["0:"], ["x:0.5"], ["0:1.1"], ["0:nan"], ["-1:0.5"], ["0:0.5", "0:0.6"]])
def test_what_is_no_limit_is_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="--model-load-gpu-limit"):
        parse_gpu_limits(texts)
