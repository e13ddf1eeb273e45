"""The graph of an ensemble's steps, according to its own config: the writers of each tensor, and conditions.

A step may have a condition, given by the ensemble's parameter `step.<index or model>.condition`: the name of a
BOOL tensor of the ensemble, or `!` and the name. The step is skipped if the condition is false, and with it every step
that needs its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
