"""How long a queue may get and how long a request may wait in it: the queue policies of a config."""

from __future__ import annotations

from dataclasses import dataclass

from modelserver.config.schema import ModelConfig, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import InFlightRequest

_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of one priority level. 0 means none, for sizes and timeouts alike.

    `delays` (DELAY): a request whose timeout expires waits behind all others of its level; else it fails.
    `is_servers_bound`: the size is the server's, because the config gives none.
    """

    max_queue_size: int = 0
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False
    delays: bool = False
    is_servers_bound: bool = False

    @classmethod
    def from_config(cls, policy: ModelQueuePolicy, default_max_queue_size: int = 0) -> QueuePolicy:
        return cls(
            max_queue_size=policy.max_queue_size or default_max_queue_size,
            default_timeout_ns=policy.default_timeout_microseconds * _NS_PER_US,
            allow_timeout_override=policy.allow_timeout_override,
            delays=policy.timeout_action is TimeoutAction.DELAY,
            is_servers_bound=not policy.max_queue_size and default_max_queue_size > 0,
        )

    def timeout_ns(self, request: InFlightRequest) -> int:
        """The request's patience in the queue: the shorter of its own and the default, where both are given."""
        asked = request.timeout_us * _NS_PER_US if self.allow_timeout_override else 0
        if asked and self.default_timeout_ns:
            return min(asked, self.default_timeout_ns)
        return asked or self.default_timeout_ns


class PriorityLevels:
    """Priority levels and their queue policies. Level 1 is the most urgent; without levels all is level 1."""

    def __init__(self, config: ModelConfig, *, default_max_queue_size: int = 0) -> None:
        batching = config.dynamic_batching
        default_policy = batching.default_queue_policy if batching is not None else None
        self.num_levels = batching.priority_levels if batching is not None else 0
        self.default_level = batching.default_priority_level if batching is not None and self.num_levels else 1
        self.default_policy = QueuePolicy.from_config(default_policy or ModelQueuePolicy(), default_max_queue_size)
        self._policies = {
            level: QueuePolicy.from_config(policy, default_max_queue_size)
            for level, policy in (batching.priority_queue_policy.items() if batching is not None else ())
            if self.num_levels
        }

    def level_of(self, request: InFlightRequest) -> int:
        """The level that the request asks for; the default level when it asks for none or for one that is not there."""
        return request.priority if 1 <= request.priority <= self.num_levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        return self._policies.get(level, self.default_policy)
