"""CPU and memory of the server's container, if a cgroup limits it, else of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client import Metric

CGROUP = Path("/sys/fs/cgroup")
# cgroup v1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 60
_CPU_INFO = Path("/proc/cpuinfo")


def cpu_flags(path: Path = _CPU_INFO) -> frozenset[str]:
    """The instruction sets of this CPU by Linux' names; empty where the system does not list them."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(listed.partition(":")[2].split())


@dataclass(frozen=True, slots=True)
class HostReading:
    """`cpu_utilization` is the share of the CPUs the server may use, 0 to 1, since the reading before."""

    cpu_utilization: float
    memory_total_bytes: int
    memory_used_bytes: int


class HostGauges:
    """Reads the gauges when asked, at most once per interval. Not thread-safe: one reader."""

    def __init__(
        self, interval_s: float, *, cgroup: Path = CGROUP, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._cgroup = cgroup
        self._monotonic = monotonic
        self._num_cpus = _cpu_limit(cgroup)
        self._before = (monotonic(), self._busy_s())
        self._reading: HostReading | None = None
        self._read_at = 0.0

    def read(self) -> HostReading:
        """The newest reading, taken now unless the last one is younger than the interval."""
        now = self._monotonic()
        if self._reading is None or now - self._read_at >= self._interval_s:
            self._reading = self._take(now)
            self._read_at = now
        return self._reading

    def families(self) -> list[Metric]:
        """The families of the machine's CPUs and memory, read now."""
        reading = self.read()
        values = (
            ("nv_cpu_utilization", "Share of the CPUs in use, 0.0 to 1.0", reading.cpu_utilization),
            ("nv_cpu_memory_total_bytes", "Memory that the server may use, in bytes", reading.memory_total_bytes),
            ("nv_cpu_memory_used_bytes", "Memory in use, in bytes", reading.memory_used_bytes),
            # Triton's dashboards use them.
            ("nv_pinned_memory_pool_total_bytes", "Size of the pool of pinned memory: there is none", 0),
            ("nv_pinned_memory_pool_used_bytes", "Pinned memory in use of the pool, in bytes", 0),
        )
        families = []
        for name, text, value in values:
            metric = Metric(name, text, "gauge")
            metric.add_sample(name, {}, value)
            families.append(metric)
        return families

    def _take(self, now: float) -> HostReading:
        then, busy_then = self._before
        busy = self._busy_s()
        elapsed = now - then
        self._before = (now, busy)
        share = (busy - busy_then) / (elapsed * self._num_cpus) if elapsed > 0 else 0.0
        total, used = self._memory()
        return HostReading(min(1.0, max(0.0, share)), total, used)

    def _busy_s(self) -> float:
        """CPU seconds used so far by the container, or by the machine."""
        usage = _fields(self._cgroup / "cpu.stat").get("usage_usec")
        if usage is not None and _is_limited(self._cgroup):
            return usage / 1e6
        usage_ns = _number(self._cgroup / "cpuacct" / "cpuacct.usage")
        if usage_ns is not None and _is_limited(self._cgroup):
            return usage_ns / 1e9
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guest time is part of user time already.
        doubled = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return float(sum(times) - idle - doubled)

    def _memory(self) -> tuple[int, int]:
        machine = psutil.virtual_memory()
        for limit_name, used_name, stat_name, cache_key in (
            ("memory.max", "memory.current", "memory.stat", "inactive_file"),
            (
                "memory/memory.limit_in_bytes",
                "memory/memory.usage_in_bytes",
                "memory/memory.stat",
                "total_inactive_file",
            ),
        ):
            limit = _number(self._cgroup / limit_name)
            used = _number(self._cgroup / used_name)
            if limit is None or used is None or limit >= min(_NO_LIMIT_BYTES, machine.total):
                continue
            # File pages that the kernel can reclaim at once do not count as in use, as in the kubelet.
            reclaimable = _fields(self._cgroup / stat_name).get(cache_key, 0)
            return limit, max(0, used - reclaimable)
        return int(machine.total), int(machine.total - machine.available)


def _is_limited(cgroup: Path) -> bool:
    """Whether the cgroup is a container's own, not the machine's root (which has no limits)."""
    return _quota_cpus(cgroup) is not None


def _cpu_limit(cgroup: Path) -> float:
    return _quota_cpus(cgroup) or float(os.cpu_count() or 1)


def _quota_cpus(cgroup: Path) -> float | None:
    """CPUs that a quota allows, or None without one."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        v1_quota = _number(cgroup / "cpu" / "cpu.cfs_quota_us")
        v1_period = _number(cgroup / "cpu" / "cpu.cfs_period_us")
        if not v1_quota or not v1_period or v1_quota < 0:
            return None
        return v1_quota / v1_period
    return None if quota == "max" else int(quota) / int(period)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """`name value` lines."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


# Private memory of processes.
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """`kind` is CPU, CPU_PINNED or GPU, `id` the device's."""

    kind: str
    id: int
    byte_size: int


def process_memory(pids: Iterable[int]) -> tuple[MemoryUsage, ...]:
    """The private host memory of these processes: one entry, none without processes.

    Pages of libraries and of tensors in shared memory are not counted, nor processes that have ended.
    """
    sizes = [size for pid in pids if (size := _private_bytes(pid)) is not None]
    return (MemoryUsage("CPU", 0, sum(sizes)),) if sizes else ()


def _private_bytes(pid: int) -> int | None:
    """proc(5): the second number of statm is what is resident, the third what of it is shared; in pages."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):  # it has ended
        return None
    return (int(resident) - int(shared)) * _PAGE_BYTES


def own_memory_bytes() -> int:
    """The private memory of this process; 0 if unknown."""
    return _private_bytes(os.getpid()) or 0
