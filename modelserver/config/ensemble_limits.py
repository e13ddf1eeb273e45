"""Timeouts and retries of an ensemble's steps: parameters of the ensemble.

`step.<index or model>.timeout_microseconds` bounds each attempt, from the request to the model until its last response.
`step.<index or model>.retries` is how many attempts may follow the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelserver.config.ensemble_parameters import RETRIES, TIMEOUT, StepParameter, step_parameters
from modelserver.config.report import Report
from modelserver.config.schema import ModelConfig

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
