"""Problems of a model config and their positions: `Problem`, `Locations` and the error that carries them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from modelserver.errors import ConfigError

# How many of Triton's sentences an error starts with.
_MAX_SUMMARIES = 3
# The last step of a field path: `.name`, `[3]` or `["key"]`.
_LAST_STEP = re.compile(r'(\.[A-Za-z_]\w*|\[\d+\]|\["(?:[^"\\]|\\.)*"\])$')


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake; line and column count from 1 and are None where the source has no lines.

    `field` is a path such as `input[0].dims[1]` or `parameters["key"]`, empty for the file as a whole.
    `summary` is the mistake in Triton's words: the error begins with it, as scripts match that sentence.
    """

    source: str
    line: int | None
    column: int | None
    field: str
    message: str
    hint: str | None = None
    summary: str = ""

    def __str__(self) -> str:
        where = [self.source] + [str(number) for number in (self.line, self.column) if number is not None]
        parts = [":".join(where), *([self.field] if self.field else []), self.message]
        return ": ".join(parts) + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True)
class Locations:
    """Where each field of a parsed file begins."""

    positions: Mapping[str, tuple[int, int]]

    def find(self, path: str) -> tuple[int, int] | None:
        """Line and column of the field, or of the nearest enclosing message in the file."""
        while path:
            if path in self.positions:
                return self.positions[path]
            path = parent(path)
        return None


def parent(path: str) -> str:
    """The path without its last step; empty for a field of the config itself."""
    match = _LAST_STEP.search(path)
    return path[: match.start()] if match else ""


def key_path(path: str, key: object) -> str:
    """The path of one entry of the map at `path`; a string key is quoted."""
    if isinstance(key, str):
        escaped = key.replace("\\", "\\\\").replace('"', '\\"')
        return f'{path}["{escaped}"]'
    return f"{path}[{key}]"


def error_of(problems: Iterable[Problem], source: str) -> ConfigError:
    """The ConfigError that carries `problems`, in the order of the file; it begins with their first summaries.

    Triton stops at the first mistake in its own order, so the sentence that a script expects is among them.
    """
    ordered = tuple(sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0)))
    summaries = dict.fromkeys(problem.summary for problem in ordered if problem.summary)
    summary = "".join(f"{sentence}: " for sentence in [*summaries][:_MAX_SUMMARIES])
    if len(ordered) == 1:
        return ConfigError(f"{summary}{ordered[0]}", ordered)
    lines = "".join(f"\n  {problem}" for problem in ordered)
    return ConfigError(f"{summary}{source}: {len(ordered)} problems{lines}", ordered)
