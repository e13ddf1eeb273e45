"""What all models of a server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelserver.cache.store import AnswerStore
from modelserver.execution.gpu_limits import GpuLimits
from modelserver.execution.host_policy import HostCores
from modelserver.scheduling.rate_limit import RateLimiter


@dataclass(frozen=True, slots=True)
class SharedResources:
    """`answers` is where response caches keep answers; without it no model has a cache. `limiter` decides who executes
    of those that need the same resources; without it nobody waits for any. `cores` says where instances run.
    `is_fair`: callers share queues by weight. `is_adaptive`: who would be answered too late is refused at once.
    `summary_quantiles` are wanted of the durations of each model, if any.
    """

    answers: AnswerStore | None = None
    limiter: RateLimiter | None = None
    cores: HostCores = field(default_factory=HostCores)
    gpu_limits: GpuLimits = field(default_factory=GpuLimits)
    is_fair: bool = False
    is_adaptive: bool = False
    summary_quantiles: tuple[float, ...] = ()
