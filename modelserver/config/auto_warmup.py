"""The parameter `auto_warmup`: warm a model up in all relevant sizes, without samples in the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserver.config.problem import Report, key_path
from modelserver.config.schema import ModelConfig, ModelInput

AUTO_WARMUP = "auto_warmup"

_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AutoWarmup:
    """The smallest and the largest size of variable dimensions: of `every` dimension, and by input in order."""

    every: Range = (1, 1)
    inputs: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)

    def ranges(self, tensor: ModelInput) -> tuple[Range, ...]:
        """A range for each of an input's variable dimensions."""
        num_variable = sum(dim == -1 for dim in tensor.dims)
        given = self.inputs.get(tensor.name, (self.every,))
        return given * num_variable if len(given) == 1 else given


def auto_warmup(config: ModelConfig) -> AutoWarmup | None:
    """The warmup of a valid config; None if it does not set the parameter."""
    text = config.parameters.get(AUTO_WARMUP, "").strip()
    if text.lower() in ("", "false"):
        return None
    return _parse(text)


def warmup_rows(config: ModelConfig) -> tuple[int | None, ...]:
    """The relevant batch sizes: 1, the preferred ones, the largest. Only None without a batch dimension."""
    if not config.max_batch_size:
        return (None,)
    if config.sequence_batching is not None:
        return (1,)
    preferred = config.dynamic_batching.preferred_batch_size if config.dynamic_batching is not None else ()
    return tuple(sorted({1, *preferred, config.max_batch_size}))


def check_auto_warmup(config: ModelConfig, report: Report) -> None:
    """Report invalid values of the parameter."""
    path = key_path("parameters", AUTO_WARMUP)
    try:
        asked = auto_warmup(config)
    except ValueError as error:
        report.add(path, str(error))
        return
    if asked is None or not config.input:
        return
    tensors = {tensor.name: tensor for tensor in config.input}
    for name, ranges in asked.inputs.items():
        if name not in tensors:
            report.add(path, f"expected inputs of the model, got '{name}'")
            continue
        num_variable = sum(dim == -1 for dim in tensors[name].dims)
        if len(ranges) not in (1, num_variable):
            report.add(
                path, f"expected one range or {num_variable} for the variable dims of '{name}', got {len(ranges)}"
            )


def _parse(text: str) -> AutoWarmup:
    every: Range = (1, 1)
    inputs: dict[str, tuple[Range, ...]] = {}
    for part in text.split(";"):
        name, equals, ranges = part.strip().rpartition("=")
        if equals:
            inputs[name.strip()] = tuple(map(_range, ranges.split(",")))
        elif part.strip().lower() != "true":
            every = _range(part)
    return AutoWarmup(every, inputs)


def _range(text: str) -> Range:
    match = _RANGE.fullmatch(text.strip())
    low, high = map(int, match.groups()) if match else (1, 0)
    if not low <= high:
        raise ValueError(f"expected true, MIN-MAX or INPUT=MIN-MAX, several separated by ';', got '{text:.40}'")
    return low, high
