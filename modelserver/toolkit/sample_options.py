"""Where the samples come from that two models, or two settings of one, are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelserver.config.schema import ModelConfig
from modelserver.toolkit.comparison import MEASURE_S
from modelserver.toolkit.sample_files import read_samples
from modelserver.toolkit.samples import MadeUp, Samples, made_up_samples

# Random samples for the comparison if none are given.
NUM_MADE_UP = 32


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """Where samples come from: a file or directory; else made up, with `shapes` for variable dimensions.

    `measure_s` is how long latencies are measured for each number of rows, by those who measure them.
    """

    path: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    label_output: str = ""
    measure_s: float = MEASURE_S

    def samples(self, config: ModelConfig, count: int = NUM_MADE_UP) -> Samples:
        """Raises InvalidArgumentError."""
        if self.path is not None:
            return read_samples(self.path, config)
        return made_up_samples(config, MadeUp(count, self.shapes))
