"""The parts of a request to an ensemble that are under way: calls of its steps, their attempts, and iterations."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

from modelserver.config.ensemble_graph import Condition
from modelserver.config.ensemble_parameters import StepLimits
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ParameterValue, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import ErrorCode, InvalidArgumentError, QueueTimeoutError, ServerError
from modelserver.scheduling.ensemble_plan import ScopePlan, StepPlan
from modelserver.telemetry.measurement import Measurement


class StepRun(Protocol):
    """The run of a request, as the calls of its steps and their attempts use it."""

    __slots__ = ()

    request: InFlightRequest

    def receive(self, call: StepCall, response: InferResponse) -> None:
        """A response of a step's model."""

    def expire(self, call: StepCall, error: ServerError) -> None:
        """An attempt took too long."""

    def repeat(self, iteration: Iteration, step: StepPlan) -> None:
        """It is time for the next attempt."""


class StepCall(ResponseStream):
    """The stream of a step's request to its model. It does not refer to the request, so that both are freed at once.

    It also records how long the request was computed, from the computing thread, before the answer comes.
    """

    __slots__ = ("infer_ns", "input_ns", "iteration", "output_ns", "run", "step")

    def __init__(self, run: StepRun, step: StepPlan, iteration: Iteration) -> None:
        # The fields for reading a stream are left out: responses go to the run at once.
        self.is_finished = False
        self.on_read = None
        self.run = run
        self.step = step
        self.iteration = iteration
        self.input_ns = self.infer_ns = self.output_ns = 0

    def note_compute(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        self.input_ns = input_end_ns - start_ns
        self.infer_ns = output_start_ns - input_end_ns
        self.output_ns = end_ns - output_start_ns

    def note_durations(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.input_ns, self.infer_ns, self.output_ns = input_ns, infer_ns, output_ns

    def note(self, _name: str, _time_ns: int) -> None:
        """Ignored: the phases of a step belong to its own trace."""

    def follow(self, _request: Any) -> None:
        """Ignored: an ensemble within an ensemble that is not traced."""

    def deliver(self, response: InferResponse) -> None:
        if not self.is_finished:
            self.is_finished = response.is_final
            self.run.receive(self, response)


class DecoupledCall(StepCall):
    """The call of a decoupled model: each response opens an iteration, and their answers keep that order."""

    __slots__ = ("held", "next_answer", "num_opened")

    reads_later: ClassVar[bool] = True

    def __init__(self, run: StepRun, step: StepPlan, iteration: Iteration) -> None:
        super().__init__(run, step, iteration)
        self.num_opened = 0
        self.next_answer = 0
        self.held: dict[int, Iteration] = {}


# Iterations with the positions of steps in them that can start.
Ready = deque[tuple["Iteration", int]]


class Iteration:
    """One run through the steps of a scope: its tensors so far, and the steps that are left.

    `missing` is how many tensors each step still waits for, `num_left` the steps (and the answer, and iterations
    within) that have not ended.
    """

    __slots__ = (
        "inner",
        "is_unread",
        "missing",
        "num_left",
        "opener",
        "parameters",
        "parent",
        "position",
        "scope",
        "skipped",
        "values",
    )

    def __init__(self, scope: ScopePlan, parent: Iteration | None, opener: DecoupledCall | None) -> None:
        self.scope = scope
        self.parent = parent
        self.opener = opener
        self.position = 0
        self.values: dict[str, Tensor | None] = {}
        self.missing = list(scope.missing)
        self.num_left = scope.num_parts
        self.parameters: dict[str, ParameterValue] | None = None
        self.inner: list[Iteration] = []
        self.skipped: dict[str, int] = {}
        self.is_unread = False  # its answer is on its way to a client that reads later

    def find(self, tensor: str) -> Tensor | None:
        """The tensor, in this scope or those around it; None when it will not come."""
        iteration: Iteration | None = self
        while iteration is not None:
            if tensor in iteration.values:
                return iteration.values[tensor]
            iteration = iteration.parent
        raise AssertionError("a step starts when all its tensors are settled")

    def is_settled(self, tensor: str) -> bool:
        return tensor in self.values or (self.parent is not None and self.parent.is_settled(tensor))

    def holds(self, condition: Condition) -> bool:
        """Whether a condition is met. Raises InvalidArgumentError when it is not the same for all rows."""
        tensor = self.find(condition.tensor)
        if tensor is None or not tensor.data.size:
            return not condition.expected
        flat = tensor.data.reshape(-1)
        if flat.size > 1 and not (flat == flat[0]).all():
            raise InvalidArgumentError(
                f"the condition '{condition.tensor}' differs among the rows of the request: send rows that differ in "
                "different requests"
            )
        return bool(flat[0]) is condition.expected

    def settle_outputs(
        self, wanted: Sequence[tuple[str, str]], outputs: Iterable[Tensor], scopes: Sequence[ScopePlan], ready: Ready
    ) -> None:
        """A step was answered: `wanted` are the model's names of its outputs and those of the ensemble."""
        found = {tensor.name: tensor for tensor in outputs}
        for name, target in wanted:
            self.settle(target, found.get(name), scopes, ready)

    def settle(self, name: str, tensor: Tensor | None, scopes: Sequence[ScopePlan], ready: Ready) -> None:
        """A tensor has arrived, or (None) will not arrive; steps that waited only for it join `ready`."""
        values = self.values
        if name in values:
            return
        values[name] = tensor
        scope, missing = self.scope, self.missing
        for position in scope.readers.get(name, ()):
            missing[position] -= 1
            if not missing[position]:
                ready.append((self, position))
        if scope.inner and name in scope.inner:
            for inner_scope, position in scope.inner[name]:
                self._settle_within(scopes[inner_scope], position, ready)

    def _settle_within(self, scope: ScopePlan, position: int, ready: Ready) -> None:
        for inner in self.inner:
            if inner.scope is scope:
                inner.missing[position] -= 1
                if not inner.missing[position]:
                    ready.append((inner, position))
            else:
                inner._settle_within(scope, position, ready)

    def all_parameters(self) -> dict[str, ParameterValue] | None:
        """The parameters of the steps' responses; of equal names, the innermost."""
        parameters: dict[str, ParameterValue] = {}
        iteration: Iteration | None = self
        while iteration is not None:
            if iteration.parameters:
                parameters = {**iteration.parameters, **parameters}
            iteration = iteration.parent
        return parameters or None


_NS_PER_S = 1_000_000_000
# Before the second attempt; each further pause is twice as long.
_FIRST_PAUSE_S = 0.01
_MAX_PAUSE_S = 1.0
# Errors that may pass: a model that was restarted, a queue that was full. Others would only fail again.
_PASSING = frozenset({ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE, ErrorCode.UNKNOWN})


class StepCounts:
    """Retries and timeouts of an ensemble's steps, by their labels. Event loop thread."""

    def __init__(self) -> None:
        self.retries: Counter[str] = Counter()
        self.timeouts: Counter[str] = Counter()

    def measure(self) -> list[Measurement]:
        """The counters for the metrics page; none before the first retry or timeout."""
        texts = (
            ("modelserver_ensemble_step_retries", "Attempts of an ensemble's steps that followed a failed one"),
            ("modelserver_ensemble_step_timeouts", "Attempts of an ensemble's steps that took too long"),
        )
        return [
            Measurement(name, "counter", text, count, {"step": step})
            for (name, text), counts in zip(texts, (self.retries, self.timeouts), strict=True)
            for step, count in counts.items()
        ]


class AttemptsOwner(Protocol):
    """The scheduler, as attempts use it."""

    step_counts: StepCounts

    now_ns: Callable[[], int]

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle: ...


class Attempts:
    """The timeouts and retries of one request's steps. It keeps timers; `close` cancels them all."""

    __slots__ = ("_failed", "_owner", "_run", "_timers")

    def __init__(self, owner: AttemptsOwner, run: StepRun) -> None:
        self._owner = owner
        self._run = run
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._failed: Counter[tuple[Iteration, int]] = Counter()

    def begin(self, call: StepCall, limits: StepLimits) -> None:
        """An attempt begins."""
        if limits.timeout_us:
            self._timers[call] = self._owner.call_later(limits.timeout_us / 1e6, self._on_timeout, call, limits)

    def ended(self, call: StepCall) -> None:
        """The attempt had its last response, or could not begin."""
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    def retry(self, call: StepCall, limits: StepLimits, error: ServerError) -> bool:
        """Whether the step is attempted again after this failure: `StepRun.repeat` is called after a pause."""
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
