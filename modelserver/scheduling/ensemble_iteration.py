"""What one request to an ensemble has under way: requests to the models of its steps, and runs through their scopes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from modelserver.config.ensemble_graph import Condition
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.scheduling.ensemble_plan import ScopePlan, StepPlan


class Receiver(Protocol):
    """Where a step's responses go: the run of the request."""

    def receive(self, call: StepCall, response: InferResponse) -> None: ...


class StepCall(ResponseStream):
    """Where a step's request to its model is answered. It does not refer to the request, so that both go at once.

    It is also told how long the request was computed, from the thread that does, before the answer comes.
    """

    __slots__ = ("infer_ns", "input_ns", "iteration", "output_ns", "run", "step")

    def __init__(self, run: Receiver, step: StepPlan, iteration: Iteration) -> None:
        # What a reader of a stream would need is left out: responses go to the run at once.
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
        """Phases of a step are told in its own trace only."""

    def follow(self, _request: Any) -> None:
        """An ensemble within an ensemble, of which nobody asked for a trace."""

    def deliver(self, response: InferResponse) -> None:
        if not self.is_finished:
            self.is_finished = response.is_final
            self.run.receive(self, response)


class DecoupledCall(StepCall):
    """... of a decoupled model: each response opens an iteration, and their answers leave in their order."""

    __slots__ = ("held", "next_answer", "num_opened")

    reads_later: ClassVar[bool] = True

    def __init__(self, run: Receiver, step: StepPlan, iteration: Iteration) -> None:
        super().__init__(run, step, iteration)
        self.num_opened = 0
        self.next_answer = 0
        self.held: dict[int, Iteration] = {}


# Iterations with the positions of steps in them that can start.
Ready = deque[tuple["Iteration", int]]


class Iteration:
    """One run through the steps of a scope: the tensors that are there, and what is still to be done.

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
        """A tensor is there, or (None) will not come; steps that waited for nothing else join `ready`."""
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
        """What the steps said beside their outputs; of a name that several use, the innermost."""
        parameters: dict[str, ParameterValue] = {}
        iteration: Iteration | None = self
        while iteration is not None:
            if iteration.parameters:
                parameters = {**iteration.parameters, **parameters}
            iteration = iteration.parent
        return parameters or None
