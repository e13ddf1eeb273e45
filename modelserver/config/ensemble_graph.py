"""The graph of an ensemble's steps, according to its own config: the writers of each tensor, and conditions.

A step may have a condition, given by the ensemble's parameter `step.<index or model>.condition`: the name of a
BOOL tensor of the ensemble, or `!` and the name. The step is skipped if the condition is false, and with it every step
that needs its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelserver.config.ensemble_parameters import CONDITION, StepParameter, step_parameters
from modelserver.config.problem import Report
from modelserver.config.schema import EnsembleStep, ModelConfig

_NOT = "!"


@dataclass(frozen=True, slots=True)
class Condition:
    """A step runs if the BOOL `tensor` is `expected`; an absent tensor counts as false."""

    tensor: str
    expected: bool = True

    def excludes(self, other: Condition) -> bool:
        """Whether the two conditions can never both hold."""
        return self.tensor == other.tensor and self.expected is not other.expected

    def __str__(self) -> str:
        return self.tensor if self.expected else f"{_NOT}{self.tensor}"


Guards = frozenset[Condition]
# Whether a step needs its model's input of that name, given the step's index; if not, the step may run without it.
IsRequired = Callable[[int, str], bool]


@dataclass(frozen=True, slots=True)
class EnsembleGraph:
    """The steps and the tensors between them. `writers` are indexes of steps, by tensor, in the order of the config.

    `conditions` are the steps' own conditions.
    """

    steps: tuple[EnsembleStep, ...]
    inputs: frozenset[str]
    writers: Mapping[str, tuple[int, ...]]
    conditions: Mapping[int, Condition]

    def needs(self, index: int) -> tuple[str, ...]:
        """The tensors that a step waits for: its inputs, and that of its condition."""
        condition = self.conditions.get(index)
        names = dict.fromkeys(self.steps[index].input_map.values())
        if condition is not None:
            names[condition.tensor] = None
        return tuple(names)

    def before(self, index: int) -> tuple[int, ...]:
        """The steps that a step waits for, ascending."""
        return tuple(sorted({writer for tensor in self.needs(index) for writer in self.writers.get(tensor, ())}))

    def order(self) -> tuple[int, ...]:
        """The steps in an order that respects their dependencies. The graph must not have cycles."""
        num_missing = {index: len(self.before(index)) for index in range(len(self.steps))}
        after: dict[int, list[int]] = {index: [] for index in num_missing}
        for index in num_missing:
            for writer in self.before(index):
                after[writer].append(index)
        order: list[int] = []
        ready = [index for index, count in num_missing.items() if not count]
        while ready:
            order += ready
            following = []
            for index in ready:
                for reader in after[index]:
                    num_missing[reader] -= 1
                    if not num_missing[reader]:
                        following.append(reader)
            ready = sorted(following)
        assert len(order) == len(self.steps), "the graph was checked for cycles"
        return tuple(order)

    def guards(self, is_required: IsRequired) -> dict[int, Guards]:
        """For each step, the conditions that hold whenever it runs. The graph must not have cycles."""
        guards: dict[int, Guards] = {}
        for index in self.order():
            own = self.conditions.get(index)
            found = frozenset(() if own is None else (own,))
            for name, tensor in self.steps[index].input_map.items():
                writers = self.writers.get(tensor, ())
                if writers and is_required(index, name):
                    found |= frozenset.intersection(*(guards[writer] for writer in writers))
            guards[index] = found
        return guards

    def name_of(self, index: int) -> str:
        """The step in words."""
        return f"step[{index}] (model '{self.steps[index].model_name}')"


def are_exclusive(one: Guards, other: Guards) -> bool:
    """Whether at most one of two steps with these guards runs."""
    return any(first.excludes(second) for first in one for second in other)


def ensemble_graph(config: ModelConfig) -> EnsembleGraph:
    """The graph of an ensemble, without invalid parts (see `ensemble_rules`)."""
    ensemble = config.ensemble_scheduling
    steps = ensemble.step if ensemble is not None else ()
    writers: dict[str, tuple[int, ...]] = {}
    for index, step in enumerate(steps):
        for tensor in dict.fromkeys(step.output_map.values()):
            writers[tensor] = (*writers.get(tensor, ()), index)
    found = {index: _condition(parameter) for index, parameter in step_parameters(config, CONDITION).items()}
    conditions = {index: condition for index, condition in found.items() if condition is not None}
    return EnsembleGraph(steps, frozenset(tensor.name for tensor in config.input), writers, conditions)


def check_conditions(config: ModelConfig, report: Report) -> None:
    """Report conditions without a tensor's name."""
    for parameter in step_parameters(config, CONDITION).values():
        if _condition(parameter) is None:
            message = f"expected the name of a BOOL tensor of the ensemble, or {_NOT} and the name, got none"
            report.add(parameter.path, message)


def condition_paths(config: ModelConfig) -> dict[int, str]:
    """The field path of each step's condition."""
    return {index: parameter.path for index, parameter in step_parameters(config, CONDITION).items()}


def _condition(parameter: StepParameter) -> Condition | None:
    name = parameter.value.removeprefix(_NOT).strip()
    return Condition(name, not parameter.value.startswith(_NOT)) if name else None


# Scopes of an ensemble's steps: a step runs once, or once for each response of a decoupled step before it.
#
# Steps after a decoupled step are in its scope and run for each of its responses; scope 0 is the whole request. Scopes
# nest. A step may use tensors of its own scope and of enclosing scopes, which are the same in all of its runs. Tensors
# of sibling scopes are unrelated, so no step may need both.
@dataclass(frozen=True, slots=True)
class Scopes:
    """`parents` has the scope around each scope (-1 around scope 0). `opened` is by decoupled step."""

    parents: tuple[int, ...]
    of_step: tuple[int, ...]
    of_tensor: Mapping[str, int]
    opened: Mapping[int, int]
    of_outputs: int


@dataclass(frozen=True, slots=True)
class ScopeConflict:
    """Something that needs tensors of several scopes: a step, or with `step` None the outputs of the ensemble."""

    step: int | None
    message: str
    is_input: bool = True


def find_scopes(
    graph: EnsembleGraph, is_decoupled: Sequence[bool], outputs: Iterable[str]
) -> tuple[Scopes, tuple[ScopeConflict, ...]]:
    """The scopes of a graph without cycles, and the conflicts. With conflicts the scopes are not usable."""
    finder = _Finder(graph)
    for index in graph.order():
        finder.add(index, is_decoupled=is_decoupled[index])
    of_outputs = finder.deepest(None, outputs)
    of_step = tuple(finder.of_step[index] for index in range(len(graph.steps)))
    scopes = Scopes(tuple(finder.parents), of_step, finder.of_tensor, finder.opened, of_outputs)
    return scopes, tuple(finder.conflicts)


class _Finder:
    def __init__(self, graph: EnsembleGraph) -> None:
        self._graph = graph
        self.parents = [-1]
        self.of_step: dict[int, int] = {}
        self.of_tensor: dict[str, int] = dict.fromkeys(graph.inputs, 0)
        self.opened: dict[int, int] = {}
        self.conflicts: list[ScopeConflict] = []

    def add(self, index: int, *, is_decoupled: bool) -> None:
        """Place a step; the steps that it waits for are already placed."""
        scope = self.of_step[index] = self.deepest(index, self._graph.needs(index))
        written = dict.fromkeys(self._graph.steps[index].output_map.values())
        if is_decoupled:
            scope = self.opened[index] = self._open(scope, written)
        for tensor in written:
            if self.of_tensor.setdefault(tensor, scope) != scope:
                message = f"tensor '{tensor}' is also written by a step that answers more or less often than this one"
                self.conflicts.append(ScopeConflict(index, message, is_input=False))

    def deepest(self, step: int | None, tensors: Iterable[str]) -> int:
        """The innermost scope of tensors that may be used together."""
        deepest, source = 0, ""
        for tensor in tensors:
            scope = self.of_tensor.get(tensor, 0)
            if self._is_within(scope, deepest):
                deepest, source = scope, tensor
            elif not self._is_within(deepest, scope):
                who = "the outputs of the ensemble" if step is None else self._graph.name_of(step)
                verb = "come" if step is None else "receives inputs"
                message = (
                    f"{who} {verb} from different decoupled models: '{source}' and '{tensor}' do not belong together"
                )
                self.conflicts.append(ScopeConflict(step, message))
        return deepest

    def _open(self, around: int, written: Iterable[str]) -> int:
        """The scope of a decoupled step: that of the other step that may write the same tensors, if there is one."""
        for tensor in written:
            shared = self.of_tensor.get(tensor)
            if shared in self.opened.values() and self.parents[shared or 0] == around:
                return shared or 0
        self.parents.append(around)
        return len(self.parents) - 1

    def _is_within(self, scope: int, other: int) -> bool:
        while scope not in (other, -1):
            scope = self.parents[scope]
        return scope == other
