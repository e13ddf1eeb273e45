"""Which requests a queue accepts: refusals, the queue policies of a config, and how fast a queue empties."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp

from modelserver.config.schema import ModelConfig, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import LOWEST_PRIORITY, InFlightRequest
from modelserver.errors import CancelledError, QueueTimeoutError, ServerError, UnavailableError
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason


def refuse(
    request: InFlightRequest, model_name: str, statistics: ModelStatistics, now_ns: int, *, is_stopped: bool
) -> ServerError | None:
    """The error of a request that cannot be accepted, recorded as a failure; None when it can."""
    error: ServerError
    if is_stopped:
        reason = FailureReason.OTHER
        error = UnavailableError(
            "Server is stopping, scheduler for model has stopped accepting new inference requests: "
            f"model '{model_name}' is being unloaded"
        )
    elif request.is_cancelled:
        reason = FailureReason.CANCELED
        error = CancelledError(f"request to model '{model_name}' was cancelled")
    elif request.deadline_ns is not None and request.deadline_ns <= now_ns:
        reason = FailureReason.REJECTED
        error = QueueTimeoutError(
            f"Request timeout expired: its deadline passed before the queue of model '{model_name}'"
        )
    else:
        return None
    statistics.record_failures(reason, (now_ns - request.arrival_ns,))
    return error


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
        """The longest wait in the queue: the shorter of the request's own and the default timeout, if both are set."""
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
        """The level that the request asks for; the default level when it names none, or an unknown one."""
        if request.priority == LOWEST_PRIORITY:
            return self.num_levels or self.default_level
        return request.priority if 1 <= request.priority <= self.num_levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        return self._policies.get(level, self.default_policy)


# Older observations count for less: by 1/e after this time with a queue, and by at most a fifth per batch.
_MEMORY_NS = 1_000_000_000
_LEAST_KEPT = 0.8
# An answer that comes too late was computed for nothing, so the mean alone is not enough.
_MARGIN = 1.2
# Batches that must have left a queue behind before there is an estimate.
_FEWEST = 3.0
# After this many batches in a row that left no queue, and the time above, observations are stale and dropped. Refused
# requests leave no queue either, so without this a model that was slow at first would count as slow for ever.
_MOST_ALONE = 5


class DrainRate:
    """Requests that leave the queue per time; time in which the queue is empty does not count.

    Every call is made under the batcher's lock, or on its loop where a slightly stale number does no harm.
    """

    __slots__ = ("_last_ns", "_noted_ns", "_num_alone", "_num_batches", "_num_requests", "_span_ns")

    def __init__(self) -> None:
        # When the last batch was taken that left requests behind; 0: the queue has been empty since.
        self._last_ns = 0
        # When the rate was last observed, and the batches since.
        self._noted_ns = 0
        self._num_alone = 0
        self._num_batches = 0.0
        self._num_requests = 0.0
        self._span_ns = 0.0

    def note(self, num_taken: int, num_left: int, now_ns: int) -> None:
        """A batch of `num_taken` requests was taken, and `num_left` still wait."""
        last_ns = self._last_ns
        self._last_ns = now_ns if num_left else 0
        if not last_ns:
            self._num_alone += 1
            if self._num_alone >= _MOST_ALONE and now_ns - self._noted_ns > _MEMORY_NS:
                self._num_batches = self._num_requests = self._span_ns = 0.0
            return
        self._noted_ns = now_ns
        self._num_alone = 0
        span_ns = now_ns - last_ns
        kept = max(exp(-span_ns / _MEMORY_NS), _LEAST_KEPT)
        self._num_batches = self._num_batches * kept + 1.0
        self._num_requests = self._num_requests * kept + num_taken
        self._span_ns = self._span_ns * kept + span_ns

    def per_request_ns(self, now_ns: int) -> float | None:
        """The time in which one request leaves the queue; None while too little is known.

        If no batch was taken for longer than usual, the queue counts as slower.
        """
        if self._num_batches < _FEWEST:
            return None
        span_ns = self._span_ns
        if self._last_ns:
            overdue_ns = now_ns - self._last_ns
            if overdue_ns * self._num_batches > 2 * span_ns:
                span_ns += overdue_ns
        return span_ns / self._num_requests

    def retry_after_s(self, num_waiting: int, now_ns: int) -> float:
        """When a queue of this length will be empty if no request arrives; one second if that is unknown."""
        each_ns = self.per_request_ns(now_ns)
        return 1.0 if each_ns is None else max(1, ceil(num_waiting * each_ns / 1_000_000)) / 1000


def expected_ns(each_ns: float, num_ahead: int, num_executing: int, *, is_answer: bool) -> float:
    """How long a request will wait behind `num_ahead` others; with `is_answer`, until it is answered.

    Executing requests are halfway through on average, and executing takes as long as that many requests take to leave
    the queue (Little's law). The wait is the expected one; the answer is almost certainly there by the time returned.
    """
    wait_ns = each_ns * (num_ahead + num_executing * 0.5)
    return _MARGIN * (wait_ns + each_ns * num_executing) if is_answer else wait_ns
