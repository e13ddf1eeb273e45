"""What the models of a server share: stored answers, cores, GPU memory, and resources that a rate limiter counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelserver.backend import DeviceKind
from modelserver.cache.local import LocalStore
from modelserver.cache.settings import CacheSettings, LocalSettings
from modelserver.cache.store import AnswerStore
from modelserver.errors import UnavailableError, UnsupportedError
from modelserver.execution.host_policy import HostCores
from modelserver.execution.placement import InstancePlan
from modelserver.scheduling.rate_limit import Claim, RateLimiter
from modelserver.telemetry.gpu import GpuMemory, gpu_memory


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """--model-load-gpu-limit: by device, the share of its memory above which no model is loaded there.

    `memory_of` returns how full a device is.
    """

    shares: Mapping[int, float] = field(default_factory=dict)
    memory_of: Callable[[int], GpuMemory | None] = gpu_memory

    def check(self, model_name: str, plans: Iterable[InstancePlan]) -> None:
        """Raise UnavailableError if a GPU that the instances would be on is over its limit.

        A GPU whose memory use is unknown counts as full, because the limit could not be kept otherwise.
        """
        on_gpus = {plan.placement.device_id for plan in plans if plan.placement.kind is DeviceKind.GPU}
        for device in sorted(on_gpus & self.shares.keys()):
            limit = self.shares[device]
            memory = self.memory_of(device)
            flag = f"--model-load-gpu-limit={device}:{limit:g}"
            if memory is None:
                raise UnavailableError(
                    f"model '{model_name}': {flag}, and the memory use of GPU {device} is unknown: "
                    "pip install nvidia-ml-py"
                )
            used = memory.used_bytes / max(1, memory.total_bytes)
            if used > limit:
                raise UnavailableError(
                    f"model '{model_name}': {used:.0%} of the memory of GPU {device} is in use, which is over {flag}: "
                    "unload a model, or raise the limit"
                )


@dataclass(frozen=True, slots=True)
class SharedResources:
    """`answers` is where response caches keep answers; without it no model has a cache. `limiter` decides which of the
    instances that need the same resources executes; without it no instance waits. `cores` says where instances run.
    `is_fair`: callers share queues by weight. `is_adaptive`: requests that would be late are refused at once.
    `summary_quantiles` are those of the durations of each model to report, if any.
    """

    answers: AnswerStore | None = None
    limiter: RateLimiter | None = None
    cores: HostCores = field(default_factory=HostCores)
    gpu_limits: GpuLimits = field(default_factory=GpuLimits)
    is_fair: bool = False
    is_adaptive: bool = False
    summary_quantiles: tuple[float, ...] = ()


def open_answer_store(settings: CacheSettings | None) -> AnswerStore | None:
    """The server's response store; None without settings.

    Raises UnsupportedError for a cache whose library is not installed.
    """
    if settings is None:
        return None
    if isinstance(settings, LocalSettings):
        return LocalStore(settings.max_bytes, ttl_s=settings.ttl_s)
    try:
        from modelserver.cache.redis_store import RedisStore  # its library is an extra
    except ImportError as error:
        raise UnsupportedError(
            f"--cache-config=redis needs the extra 'redis': pip install 'modelserver-py[redis]' ({error})"
        ) from error
    return RedisStore(settings)


logger = logging.getLogger(__name__)


class ResourceClaims:
    """The claims of a model's instances that need resources, by plan. `what` names the model in messages.

    Without `limiter` no instance has a claim.
    """

    def __init__(self, limiter: RateLimiter | None, what: str) -> None:
        self.limiter = limiter
        self._what = what
        self._claims: dict[InstancePlan, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def get(self, plan: InstancePlan) -> Claim | None:
        return self._claims.get(plan)

    def join(self, plans: Sequence[InstancePlan]) -> dict[InstancePlan, Claim]:
        """Claim resources for the instances that need them. Raises ConfigError, with nothing claimed, if one cannot."""
        claims: dict[InstancePlan, Claim] = {}
        limiter = self.limiter
        for plan in plans:
            wish = plan.group.rate_limiter
            if wish is None or not wish.resources or plan.is_passive:
                continue
            if limiter is None:
                logger.info(
                    "%s: instance '%s' has a rate_limiter, which counts only with --rate-limit=execution_count",
                    self._what,
                    plan.placement.name,
                )
                continue
            try:
                claims[plan] = limiter.join(plan.placement.name, plan.placement.device_id, wish)
            except BaseException:
                for claim in claims.values():
                    limiter.leave(claim)
                raise
        self._claims.update(claims)
        return claims

    def leave(self, plan: InstancePlan, claim: Claim | None) -> None:
        """Drop this claim of an instance that is gone. A new instance of an equal plan may have a claim of its own."""
        if claim is None or self.limiter is None:
            return
        if self._claims.get(plan) is claim:
            del self._claims[plan]
        self.limiter.leave(claim)
