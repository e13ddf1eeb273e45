"""The names of an output's classes, from the files that a config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from modelserver.config.schema import ModelConfig
from modelserver.errors import InvalidArgumentError

Labels = Mapping[str, tuple[str, ...]]


def read_labels(config: ModelConfig, directory: Path) -> Labels:
    """By output, one label per line of its `label_filename`, which is relative to the model's directory.

    Raises InvalidArgumentError for a file that cannot be read.
    """
    return {
        output.name: _read(config.name, output.name, directory / output.label_filename)
        for output in config.output
        if output.label_filename
    }


def composed_labels(config: ModelConfig, labels: Labels, of_steps: Sequence[Labels]) -> Labels:
    """The labels of an ensemble: its own, and for other outputs those of the steps' models that write them."""
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
    own = {output.name for output in config.output if output.label_filename}
    inherited = {
        written: of_step[name]
        for step, of_step in zip(steps, of_steps, strict=False)
        for name, written in step.output_map.items()
        if name in of_step
    }
    return inherited | {name: lines for name, lines in labels.items() if name in own}


def _read(model: str, output: str, path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(f"model '{model}', output '{output}': label file '{path}': {reason}") from None
