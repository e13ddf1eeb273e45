"""One request's way through the steps of an ensemble, driven by its steps' responses, on the event loop thread.

No Task and no Future: a step starts within the call that brings the last tensor it waits for. Tensors pass by
reference. A tensor that will not arrive (its step was skipped, an optional input was not given) is settled as None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from modelserver.config.ensemble_parameters import StepLimits
from modelserver.core.request import InFlightRequest, check_has_free_instance
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.tensor import Tensor
from modelserver.errors import CancelledError, InternalError, ServerError
from modelserver.scheduling.ensemble_iteration import (
    Attempts,
    AttemptsOwner,
    DecoupledCall,
    Iteration,
    StepCall,
    StepRun,
)
from modelserver.scheduling.ensemble_plan import EnsemblePlan, StepModel, StepPlan, adapt
from modelserver.telemetry.statistics import ResponseKind
from modelserver.telemetry.statistics_snapshot import FailureReason

_NS_PER_US = 1000


class RunOwner(AttemptsOwner, Protocol):
    """The scheduler, as a run uses it."""

    def holder_of(self, run: EnsembleRun, model: StepModel) -> StepModel:
        """The model that holds the sequence of the run's request: `model`, or one that it replaced."""

    def responded(self, run: EnsembleRun, position: int, kind: ResponseKind, infer_ns: int) -> None:
        """Record a response of a decoupled ensemble that is being delivered."""

    def ended(self, run: EnsembleRun, now_ns: int, reason: FailureReason | None) -> None:
        """The run is over, and the final response follows; `reason` if it is an error."""


class EnsembleRun(StepRun):
    """Answers one request exactly once on its stream, the last time with `is_final`."""

    __slots__ = (
        "_answers",
        "_attempts",
        "_backlog",
        "_calls",
        "_continues_sequence",
        "_inflight",
        "_is_advancing",
        "_is_decoupled",
        "_name",
        "_num_answers",
        "_owner",
        "_plan",
        "_ready",
        "_root",
        "_sent_ns",
        "_unread",
        "binding",
        "infer_ns",
        "input_ns",
        "is_over",
        "output_ns",
        "request",
    )

    def __init__(
        self, owner: RunOwner, name: str, request: InFlightRequest, plan: EnsemblePlan, *, is_decoupled: bool
    ) -> None:
        self.is_over = False
        self.request = request
        self.binding: object = None  # set and used by the owner
        self.input_ns = self.infer_ns = self.output_ns = 0  # sums over the steps that have ended
        self._owner = owner
        self._name = name
        self._plan = plan
        self._is_decoupled = is_decoupled
        self._is_advancing = False
        self._continues_sequence = bool(request.sequence_id) and not request.sequence_start
        self._ready: deque[tuple[Iteration, int]] = deque()
        self._calls: dict[StepCall, InFlightRequest] = {}
        self._root = Iteration(plan.scopes[0], None, None)
        self._answers: list[tuple[Iteration, InferResponse]] = []
        self._num_answers = 0
        self._sent_ns = request.arrival_ns
        self._unread: deque[Iteration | None] | None = None
        self._attempts: Attempts | None = None  # made when the first step starts that has limits
        # Used only where steps run several times and are bounded:
        self._inflight: dict[int, int] = {}
        self._backlog: dict[int, deque[tuple[Iteration, int]]] = {}

    def start(self) -> None:
        """Begin; the answer may be there when this returns."""
        request, root = self.request, self._root
        request.on_cancel = self._on_cancel
        if self._is_decoupled and request.stream.reads_later:
            self._unread = deque()
            request.stream.on_read = self._on_read
        inputs = request.inputs
        if self._plan.input_adapters:
            inputs = dict(inputs)
            adapt(inputs, self._plan.input_adapters)
        for tensor in root.scope.opening:
            root.values[tensor] = inputs.get(tensor)
        self._ready.extend((root, position) for position in root.scope.first)
        self._advance()

    def abort(self, error: ServerError) -> None:
        """End the request with an error, without waiting for its steps."""
        if not self.is_over:
            self._end_with(error, FailureReason.OTHER)

    def receive(self, call: StepCall, response: InferResponse) -> None:
        """A response of a step's model."""
        if response.is_final:
            self._calls.pop(call, None)
            if self._attempts is not None:
                self._attempts.ended(call)
            self.input_ns += call.input_ns
            self.infer_ns += call.infer_ns
            self.output_ns += call.output_ns
        if self.is_over:
            return
        if response.error is not None:
            self._fail_attempt(call, response.error)
            return
        step, iteration = call.step, call.iteration
        if isinstance(call, DecoupledCall):
            if response.outputs:
                self._open(call, response)
            else:
                call.has_read()
            if response.is_final:
                self._ended_part(iteration)
        else:
            if response.parameters:
                iteration.parameters = {**(iteration.parameters or {}), **response.parameters}
            iteration.settle_outputs(step.outputs, response.outputs, self._plan.scopes, self._ready)
            self._ended_part(iteration)
        if response.is_final and self._inflight:
            self._make_room(step)
        if not self._is_advancing:
            self._advance()

    # Steps.

    def _advance(self) -> None:
        """Start all steps that can start. Responses that arrive meanwhile are queued, so that there is no recursion."""
        self._is_advancing = True
        ready = self._ready
        while not self.is_over:
            while ready and not self.is_over:
                iteration, position = ready.popleft()
                steps = iteration.scope.steps
                if position == len(steps):
                    self._answer(iteration)
                else:
                    self._start(iteration, steps[position])
            if self.is_over or not (self._answers or not self._root.num_left):
                break
            self._send_answers()
        self._is_advancing = False

    def _start(self, iteration: Iteration, step: StepPlan) -> None:  # noqa: C901
        """Send a step's request, or skip it. One function, because it is most of what a step costs."""
        if step.condition is not None:
            try:
                is_wanted = iteration.holds(step.condition)
            except ServerError as error:
                self._fail(step, error)
                return
            if not is_wanted:
                self._skip(iteration, step)
                return
        inputs: dict[str, Tensor] = {}
        values = iteration.values
        for name, source, is_required in step.inputs:
            tensor = values[source] if source in values else iteration.find(source)
            if tensor is not None:
                inputs[name] = tensor if tensor.name == name else Tensor(name, tensor.datatype, tensor.data)
            elif is_required:
                self._skip(iteration, step)
                return
        if self._plan.max_inflight_requests and not self._has_room(iteration, step):
            return
        if step.adapters:
            adapt(inputs, step.adapters)
        whole = self.request
        call = StepCall(self, step, iteration) if step.opens is None else DecoupledCall(self, step, iteration)
        timeout_us = whole.timeout_us
        if timeout_us:
            timeout_us = max(1, timeout_us - (self._owner.now_ns() - whole.arrival_ns) // _NS_PER_US)
        model = self._owner.holder_of(self, step.model) if self._continues_sequence else step.model
        self._calls[call] = request = InFlightRequest(
            model_name=step.model_name,
            version=model.version,
            inputs=inputs,
            id=whole.id,
            outputs=step.requested,
            parameters=whole.parameters,
            priority=whole.priority,
            timeout_us=timeout_us,
            deadline_ns=whole.deadline_ns,
            sequence_id=whole.sequence_id,
            sequence_start=whole.sequence_start,
            sequence_end=whole.sequence_end,
            stream=call,
            trace=call,
        )
        if whole.trace is not None:
            whole.trace.follow(request)
        if step.limits is not None:
            self._begin_attempt(call, step.limits)
        try:
            if whole.call_origins:
                request.call_origins = whole.call_origins
                check_has_free_instance(step.model_name, whole.call_origins)
            model.infer(request)
        except ServerError as error:
            self._calls.pop(call, None)
            self._fail_attempt(call, error)

    def _begin_attempt(self, call: StepCall, limits: StepLimits) -> None:
        if self._attempts is None:
            self._attempts = Attempts(self._owner, self)
        self._attempts.begin(call, limits)

    def expire(self, call: StepCall, error: ServerError) -> None:
        """Called by the attempts: cancel the step's request, and ignore later responses of its model."""
        call.is_finished = True
        request = self._calls.pop(call, None)
        if request is not None:
            request.cancel()
        self._fail_attempt(call, error)

    def repeat(self, iteration: Iteration, step: StepPlan) -> None:
        """Called by the attempts: start a step once more."""
        self._ready.append((iteration, step.position))
        self._advance()

    def _fail_attempt(self, call: StepCall, error: ServerError) -> None:
        """A step's request failed: so does the request, unless the step is tried again."""
        step, attempts = call.step, self._attempts
        if attempts is not None and step.limits is not None:
            attempts.ended(call)
            if attempts.retry(call, step.limits, error):
                if self._inflight:
                    self._make_room(step)
                    if not self._is_advancing:
                        self._advance()
                return
        self._fail(step, error)

    def _skip(self, iteration: Iteration, step: StepPlan) -> None:
        """The step does not run: its outputs will not arrive, unless another step may write them."""
        if step.opens is None:
            for _, tensor in step.outputs:
                num_writers = iteration.scope.writers.get(tensor, 1)
                iteration.skipped[tensor] = iteration.skipped.get(tensor, 0) + 1
                if iteration.skipped[tensor] == num_writers:
                    iteration.settle(tensor, None, self._plan.scopes, self._ready)
        self._ended_part(iteration)

    def _has_room(self, iteration: Iteration, step: StepPlan) -> bool:
        """Count a request of a step, or queue it behind those in flight."""
        count = self._inflight.get(step.index, 0)
        if count < self._plan.max_inflight_requests:
            self._inflight[step.index] = count + 1
            return True
        self._backlog.setdefault(step.index, deque()).append((iteration, step.position))
        return False

    def _make_room(self, step: StepPlan) -> None:
        self._inflight[step.index] -= 1
        backlog = self._backlog.get(step.index)
        if backlog:
            self._ready.append(backlog.popleft())

    # Iterations.

    def _open(self, call: DecoupledCall, response: InferResponse) -> None:
        """A response of a decoupled step: run the steps of its scope once more."""
        parent, step = call.iteration, call.step
        assert step.opens is not None, "the step is decoupled"
        scope = self._plan.scopes[step.opens]
        iteration = Iteration(scope, parent, call)
        iteration.position = call.num_opened
        call.num_opened += 1
        iteration.parameters = dict(response.parameters) if response.parameters else None
        parent.num_left += 1
        parent.inner.append(iteration)
        for position, tensor in scope.outer:
            iteration.missing[position] += not parent.is_settled(tensor)
        iteration.settle_outputs(step.outputs, response.outputs, self._plan.scopes, self._ready)
        for tensor in scope.opening:  # outputs of other steps that open this scope
            iteration.settle(tensor, None, self._plan.scopes, self._ready)

    def _ended_part(self, iteration: Iteration) -> None:
        """A part of the iteration is over: a step (also a skipped one), its answer, or an inner iteration."""
        iteration.num_left -= 1
        if not iteration.num_left and iteration.parent is not None:
            iteration.parent.inner.remove(iteration)
            if not iteration.is_unread and iteration.opener is not None:
                iteration.opener.has_read()
            self._ended_part(iteration.parent)

    # Answers.

    def _answer(self, iteration: Iteration) -> None:
        """All outputs of one answer are settled: send it after those before it."""
        opener = iteration.opener
        if opener is None:
            self._put(iteration)
            return
        opener.held[iteration.position] = iteration
        while (following := opener.held.pop(opener.next_answer, None)) is not None:
            opener.next_answer += 1
            self._put(following)

    def _put(self, iteration: Iteration) -> None:
        found: dict[str, Tensor] = {}
        for name in self._plan.outputs:
            tensor = iteration.find(name)
            if tensor is not None:
                found[name] = tensor if tensor.name == name else Tensor(name, tensor.datatype, tensor.data)
        if self._plan.output_adapters:
            try:
                adapt(found, self._plan.output_adapters)
            except (ValueError, RuntimeError) as error:
                problem = f"ensemble '{self._name}': an output does not fit its reshape: {error}"
                self._end_with(InternalError(problem), FailureReason.OTHER)
                return
        if found or not self._is_decoupled:
            response = InferResponse(list(found.values()), None, self._parameters(iteration))
            self._answers.append((iteration, response))
            iteration.is_unread = self._unread is not None
        self._ended_part(iteration)

    def _parameters(self, iteration: Iteration) -> Mapping[str, ParameterValue] | None:
        """The parameters of the steps' responses; and the sequence id and flags, if the request is of a sequence."""
        request, parameters = self.request, iteration.all_parameters()
        if not request.sequence_id:
            return parameters
        return {
            "sequence_id": request.sequence_id,
            "sequence_start": request.sequence_start,
            "sequence_end": request.sequence_end,
            **(parameters or {}),
        }

    def _send_answers(self) -> None:
        """Deliver complete answers; the last one is final when no more can follow."""
        answers, self._answers = self._answers, []
        is_last = not self._is_decoupled or not self._root.num_left
        if not answers:
            assert is_last, "without answers, the run is over"
            self._deliver(None, InferResponse(is_final=True), is_final=True)
        for position, (iteration, response) in enumerate(answers):
            self._deliver(iteration, response, is_final=is_last and position == len(answers) - 1)
            if self.is_over:
                return

    def _deliver(self, iteration: Iteration | None, response: InferResponse, *, is_final: bool) -> None:
        now_ns = self._owner.now_ns()
        response.is_final = is_final
        if self._is_decoupled:
            kind = ResponseKind.SUCCESS if response.outputs else ResponseKind.EMPTY
            self._owner.responded(self, self._num_answers, kind, now_ns - self._sent_ns)
            self._num_answers += 1
            self._sent_ns = now_ns
            if self._unread is not None:
                self._unread.append(iteration)
        if is_final:
            self._close(now_ns, None)
        self.request.stream.deliver(response)

    def _fail(self, step: StepPlan, error: ServerError) -> None:
        """A step failed: fail the request with its error."""
        is_cancel = self.request.is_cancelled and isinstance(error, CancelledError)
        reason = FailureReason.CANCELED if is_cancel else FailureReason.OTHER
        message = f"in ensemble '{self._name}', {error.message}; failed at {step.label}"
        self._end_with(_with_message(error, message), reason)

    def _on_cancel(self, _request: InFlightRequest) -> None:
        """The client has left."""
        if not self.is_over:
            error = CancelledError(f"request to model '{self._name}' was cancelled")
            self._end_with(error, FailureReason.CANCELED)

    def _end_with(self, error: ServerError, reason: FailureReason) -> None:
        answers, self._answers = self._answers, []
        for iteration, response in answers:  # of a decoupled ensemble, complete before the error
            self._deliver(iteration, response, is_final=False)
            if self.is_over:
                return
        now_ns = self._owner.now_ns()
        if self._is_decoupled:
            is_cancel = reason is FailureReason.CANCELED
            kind = ResponseKind.CANCEL if is_cancel else ResponseKind.FAIL
            self._owner.responded(self, self._num_answers, kind, now_ns - self._sent_ns)
        self._close(now_ns, reason)
        self.request.stream.deliver(InferResponse(error=error))

    def _close(self, now_ns: int, reason: FailureReason | None) -> None:
        """End the run, and cancel the steps that still execute."""
        self.is_over = True
        self.request.on_cancel = None
        self._ready.clear()
        if self._attempts is not None:
            self._attempts.close()
        if self._unread is not None:
            self.request.stream.on_read = None
        calls, self._calls = self._calls, {}
        for request in calls.values():
            request.cancel()
        self._owner.ended(self, now_ns, reason)

    def _on_read(self) -> None:
        """The client has read an answer: the step that produced it may send another one."""
        if self._unread:
            iteration = self._unread.popleft()
            if iteration is not None:
                iteration.is_unread = False
                if not iteration.num_left and iteration.opener is not None:
                    iteration.opener.has_read()


def _with_message(error: ServerError, message: str) -> ServerError:
    """The same error, with another message."""
    located = type(error).__new__(type(error), message)
    located.__dict__.update(error.__dict__)
    located.message = message
    return located
