"""Attempts of a request's steps, of ensembles that limit some: which take too long, and which are repeated."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from modelserver.config.ensemble_parameters import StepLimits
from modelserver.core.request import InFlightRequest
from modelserver.errors import ErrorCode, QueueTimeoutError, ServerError
from modelserver.scheduling.ensemble_iteration import Iteration, StepCall
from modelserver.scheduling.ensemble_plan import StepPlan
from modelserver.telemetry.measurement import Measurement

_NS_PER_S = 1_000_000_000
# Before the second attempt; each further pause is twice as long.
_FIRST_PAUSE_S = 0.01
_MAX_PAUSE_S = 1.0
# What may be gone a moment later: a model that was restarted, a queue that was full. All else would fail again.
_PASSING = frozenset({ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE, ErrorCode.UNKNOWN})


class StepCounts:
    """What an ensemble's limits led to, by the labels of steps. Event loop thread."""

    def __init__(self) -> None:
        self.retries: Counter[str] = Counter()
        self.timeouts: Counter[str] = Counter()

    def measure(self) -> list[Measurement]:
        """The numbers for the metrics page; none before anything happened."""
        texts = (
            ("modelserver_ensemble_step_retries", "Attempts of an ensemble's steps that followed a failed one"),
            ("modelserver_ensemble_step_timeouts", "Attempts of an ensemble's steps that took too long"),
        )
        return [
            Measurement(name, "counter", text, count, {"step": step})
            for (name, text), counts in zip(texts, (self.retries, self.timeouts), strict=True)
            for step, count in counts.items()
        ]


class Attempted(Protocol):
    """The run of the request."""

    __slots__ = ()

    request: InFlightRequest

    def expire(self, call: StepCall, error: ServerError) -> None:
        """An attempt took too long."""

    def repeat(self, iteration: Iteration, step: StepPlan) -> None:
        """It is time for the next attempt."""


class AttemptsOwner(Protocol):
    """What the attempts of all requests of an ensemble share."""

    step_counts: StepCounts

    now_ns: Callable[[], int]

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle: ...


class Attempts:
    """Of one request. Timers are what it keeps; `close` cancels them all."""

    __slots__ = ("_failed", "_owner", "_run", "_timers")

    def __init__(self, owner: AttemptsOwner, run: Attempted) -> None:
        self._owner = owner
        self._run = run
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._failed: Counter[tuple[Iteration, int]] = Counter()

    def begin(self, call: StepCall, limits: StepLimits) -> None:
        """An attempt begins."""
        if limits.timeout_us:
            self._timers[call] = self._owner.call_later(limits.timeout_us / 1e6, self._on_timeout, call, limits)

    def ended(self, call: StepCall) -> None:
        """The attempt has its last response, or could not be made."""
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    def retry(self, call: StepCall, limits: StepLimits, error: ServerError) -> bool:
        """Whether the step is attempted again after this failure: `Attempted.repeat` is called in a while."""
        request = self._run.request
        if error.code not in _PASSING or request.sequence_id or request.is_cancelled:
            return False
        iteration, step = call.iteration, call.step
        num_failed = self._failed[iteration, step.index] + 1
        if num_failed > limits.num_retries:
            return False
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (num_failed - 1))
        deadline_ns = request.deadline_ns
        if deadline_ns is not None and self._owner.now_ns() + round(pause_s * _NS_PER_S) >= deadline_ns:
            return False
        self._failed[iteration, step.index] = num_failed
        self._owner.step_counts.retries[step.label] += 1
        self._timers[iteration, step.index] = self._owner.call_later(pause_s, self._on_pause_over, iteration, step)
        return True

    def close(self) -> None:
        """The request has ended."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _on_timeout(self, call: StepCall, limits: StepLimits) -> None:
        del self._timers[call]
        self._owner.step_counts.timeouts[call.step.label] += 1
        error = QueueTimeoutError(
            f"it was not answered within the {limits.timeout_us} us that the ensemble's config gives it"
        )
        self._run.expire(call, error)

    def _on_pause_over(self, iteration: Iteration, step: StepPlan) -> None:
        del self._timers[iteration, step.index]
        self._run.repeat(iteration, step)
