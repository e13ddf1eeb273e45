"""What the instances of a model need of resources that they share with others, where a rate limiter counts these."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from modelserver.execution.placement import InstancePlan
from modelserver.scheduling.rate_limit import Claim, RateLimiter

logger = logging.getLogger(__name__)


class ResourceClaims:
    """By plan, of the instances that need resources. `what` names the model; without `limiter` nobody has a claim."""

    def __init__(self, limiter: RateLimiter | None, what: str) -> None:
        self.limiter = limiter
        self._what = what
        self._claims: dict[InstancePlan, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def get(self, plan: InstancePlan) -> Claim | None:
        return self._claims.get(plan)

    def join(self, plans: Sequence[InstancePlan]) -> dict[InstancePlan, Claim]:
        """Claims of the instances that need resources. Raises ConfigError, with nothing claimed, for one in vain."""
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

    def leave(self, plan: InstancePlan) -> None:
        """The instance is no more, if it had a claim."""
        claim = self._claims.pop(plan, None)
        if claim is not None and self.limiter is not None:
            self.limiter.leave(claim)
