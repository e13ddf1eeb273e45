"""The host's gauges, read from files that look like a container's."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from modelserver.telemetry.host import HostGauges

GIB = 1 << 30


class Seconds:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_v2(root: Path, *, usage_s: float, limit: str = str(GIB // 2), quota: str = "200000 100000") -> None:
    root.mkdir(exist_ok=True)
    (root / "cpu.max").write_text(f"{quota}\n")
    (root / "cpu.stat").write_text(f"usage_usec {int(usage_s * 1e6)}\nuser_usec 0\nsystem_usec 0\n")
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text("3000\n")
    (root / "memory.stat").write_text("anon 1\ninactive_file 1000\n")


def write_v1(root: Path, *, usage_s: float, limit: int = GIB // 2) -> None:
    for name, text in {
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
        "cpuacct/cpuacct.usage": str(int(usage_s * 1e9)),
        "memory/memory.limit_in_bytes": str(limit),
        "memory/memory.usage_in_bytes": "3000",
        "memory/memory.stat": "total_inactive_file 1000\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_container_of_cgroup_v2_is_measured_against_its_own_limits(tmp_path: Path) -> None:
    clock = Seconds()
    write_v2(tmp_path, usage_s=10)
    gauges = HostGauges(1.0, cgroup=tmp_path, monotonic=clock)
    clock.now += 10
    write_v2(tmp_path, usage_s=15)  # 5 of the 20 CPU seconds that two CPUs have in ten
    reading = gauges.read()
    assert reading.cpu_utilization == pytest.approx(0.25)
    assert (reading.memory_total_bytes, reading.memory_used_bytes) == (GIB // 2, 2000)


def test_a_container_of_cgroup_v1_is_measured_likewise(tmp_path: Path) -> None:
    clock = Seconds()
    write_v1(tmp_path, usage_s=10)
    gauges = HostGauges(1.0, cgroup=tmp_path, monotonic=clock)
    clock.now += 10
    write_v1(tmp_path, usage_s=12)  # 2 of the 5 CPU seconds that half a CPU has in ten
    reading = gauges.read()
    assert reading.cpu_utilization == pytest.approx(0.4)
    assert (reading.memory_total_bytes, reading.memory_used_bytes) == (GIB // 2, 2000)


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_without_a_limit_the_machine_counts(tmp_path: Path, limit: str) -> None:
    write_v2(tmp_path, usage_s=1, limit=limit, quota="max 100000")
    reading = HostGauges(1.0, cgroup=tmp_path).read()
    assert reading.memory_total_bytes == psutil.virtual_memory().total
    assert 0 <= reading.cpu_utilization <= 1
    assert 0 < reading.memory_used_bytes < reading.memory_total_bytes


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    reading = HostGauges(1.0, cgroup=tmp_path / "none").read()
    assert reading.memory_total_bytes == psutil.virtual_memory().total


def test_a_reading_is_kept_for_the_interval(tmp_path: Path) -> None:
    clock = Seconds()
    write_v2(tmp_path, usage_s=0)
    gauges = HostGauges(2.0, cgroup=tmp_path, monotonic=clock)
    clock.now += 2
    first = gauges.read()
    write_v2(tmp_path, usage_s=100)
    clock.now += 1
    assert gauges.read() is first
    clock.now += 1
    assert gauges.read().cpu_utilization == 1.0
