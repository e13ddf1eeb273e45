"""Parameters of an ensemble that concern one of its steps: their keys are `step.<index or model>.<what>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from modelserver.config.problem import key_path
from modelserver.config.report import Report
from modelserver.config.schema import EnsembleStep, ModelConfig

_PREFIX = "step."
_KEY = re.compile(r"step\.(?P<step>.+)\.(?P<what>[^.]+)")

CONDITION = "condition"
RETRIES = "retries"
TIMEOUT = "timeout_microseconds"
# The parameters of a step, in words.
_NAMES = {CONDITION: "a condition", RETRIES: "retries", TIMEOUT: "a timeout"}


@dataclass(frozen=True, slots=True)
class StepParameter:
    """A parameter of a step, with its `key`."""

    key: str
    step: int
    what: str
    value: str

    @property
    def path(self) -> str:
        """Its field path."""
        return key_path("parameters", self.key)


def step_parameters(config: ModelConfig, what: str) -> dict[int, StepParameter]:
    """The parameters of one kind, by step; invalid keys are left out."""
    found: dict[int, StepParameter] = {}
    for parameter in _read(config, None):
        if parameter.what == what:
            found[parameter.step] = parameter
    return found


def check_keys(config: ModelConfig, report: Report) -> None:
    """Report keys that look like parameters of a step but are not."""
    seen: dict[tuple[int, str], str] = {}
    for parameter in _read(config, report):
        first = seen.setdefault((parameter.step, parameter.what), parameter.key)
        if first != parameter.key:
            report.add(parameter.path, f"step[{parameter.step}] has {_NAMES[parameter.what]} already: '{first}'")


def _read(config: ModelConfig, report: Report | None) -> Iterator[StepParameter]:
    ensemble = config.ensemble_scheduling
    steps = ensemble.step if ensemble is not None else ()
    for key, value in config.parameters.items():
        if not key.startswith(_PREFIX):
            continue
        match = _KEY.fullmatch(key)
        if match is None or match["what"] not in _NAMES:
            problem = f"expected as key step.<index or model>, and one of .{', .'.join(_NAMES)}"
        else:
            step = _step_of(match["step"], steps)
            if isinstance(step, int):
                yield StepParameter(key, step, match["what"], value)
                continue
            problem = step
        if report is not None:
            report.add(key_path("parameters", key), problem)


def _step_of(text: str, steps: Sequence[EnsembleStep]) -> int | str:
    """The step that a key means, or the key's problem."""
    if text.isascii() and text.isdigit():
        index = int(text)
        return index if index < len(steps) else f"step[{index}] does not exist: the ensemble has {len(steps)} steps"
    indexes = [index for index, step in enumerate(steps) if step.model_name == text]
    if not indexes:
        return f"no step has the model '{text}'"
    if len(indexes) > 1:
        return f"several steps have the model '{text}': use the index of one, one of {indexes}"
    return indexes[0]
