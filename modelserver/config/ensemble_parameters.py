"""Parameters of an ensemble that concern one of its steps: their keys are `step.<index or model>.<what>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from modelserver.config.problem import Report, key_path
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


# Timeouts and retries of an ensemble's steps: parameters of the ensemble. `step.<index or
# model>.timeout_microseconds` bounds each attempt, from the request to the model until its last response.
# `step.<index or model>.retries` is how many attempts may follow the first.
MAX_RETRIES = 10
_MAX_TIMEOUT_US = 1 << 53  # the largest integer that every JSON client can represent


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`timeout_us` 0: attempts have no time limit."""

    timeout_us: int = 0
    num_retries: int = 0


def step_limits(config: ModelConfig) -> dict[int, StepLimits]:
    """The limits of the steps, where set. The config must have passed `check_limits`."""
    timeouts = {index: _number(found, 1) or 0 for index, found in step_parameters(config, TIMEOUT).items()}
    retries = {index: _number(found, 0) or 0 for index, found in step_parameters(config, RETRIES).items()}
    return {
        index: StepLimits(timeouts.get(index, 0), retries.get(index, 0))
        for index in dict.fromkeys((*timeouts, *retries))
    }


def check_limits(config: ModelConfig, report: Report) -> None:
    """Report limits that are not numbers, or too large."""
    for found in step_parameters(config, TIMEOUT).values():
        if _number(found, 1) is None:
            report.add(found.path, f"expected microseconds, a whole number from 1 on, got '{found.value}'")
    for found in step_parameters(config, RETRIES).values():
        if _number(found, 0) is None:
            report.add(found.path, f"expected a whole number from 0 to {MAX_RETRIES}, got '{found.value}'")


def check_limits_of_models(config: ModelConfig, models: Mapping[int, ModelConfig], report: Report) -> None:
    """Report retries of steps whose models must not get the same request twice."""
    for index, found in step_parameters(config, RETRIES).items():
        model = models.get(index)
        if model is None or not _number(found, 0):
            continue
        if model.is_decoupled:
            message = f"model '{model.name}' is decoupled: responses that it sent before a failure cannot be withdrawn"
            report.add(found.path, message, "remove the retries")
        elif model.sequence_batching is not None:
            message = f"model '{model.name}' has sequences: it may have changed its state before it failed"
            report.add(found.path, message, "remove the retries")


def _number(found: StepParameter, least: int) -> int | None:
    """The value, or None if it is invalid."""
    text = found.value.strip()
    most = MAX_RETRIES if found.what == RETRIES else _MAX_TIMEOUT_US
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or not least <= int(text) <= most:
        return None
    return int(text)
