"""The results of a run of prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from modelserver.bench.llm.figures import LlmFigures
from modelserver.bench.llm.options import LlmOptions
from modelserver.bench.llm.records import Call


@dataclass(slots=True)
class LlmLevel:
    """One level of load."""

    value: float
    figures: LlmFigures
    failures: Counter[str]
    num_unanswered: int
    busiest: float
    calls: list[Call] = field(default_factory=list)

    @property
    def num_failures(self) -> int:
        return self.failures.total() + self.num_unanswered


@dataclass(slots=True)
class LlmResults:
    """A whole run."""

    options: LlmOptions
    num_workers: int
    levels: list[LlmLevel] = field(default_factory=list)

    @property
    def num_failures(self) -> int:
        return sum(level.num_failures for level in self.levels)

    @property
    def is_good(self) -> bool:
        return bool(self.levels) and not self.num_failures and all(level.figures.num_requests for level in self.levels)
