"""Problems of a model config and their positions: `Problem`, `Locations` and the error that carries them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

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


class Report:
    """The problems of one config, each with its place if the config came from a text."""

    def __init__(self, source: str, locations: Locations | None, model_name: str = "") -> None:
        self.model_name = model_name
        self._source = source
        self._locations = locations
        self.problems: list[Problem] = []

    def add(self, path: str, message: str, hint: str | None = None, *, summary: str = "") -> None:
        """Add a problem of the field at `path`; `message` states the expected and the actual value.

        `summary` is Triton's sentence for the mistake, if it has one.
        """
        line, column = (self._locations.find(path) if self._locations else None) or (None, None)
        self.problems.append(Problem(self._source, line, column, path, message, hint, summary))

    def check_name(self, path: str, name: str, what: str, *, summary: str = "") -> None:
        """A name must not be empty."""
        if not name:
            self.add(path, f"expected {what}, got none", summary=summary)

    def check_file(self, path: str, filename: str) -> None:
        """A file of the model must lie in the model's own directory."""
        file = PurePosixPath(filename.replace("\\", "/"))
        if file.is_absolute() or ".." in file.parts or "\0" in filename:
            self.add(path, f"expected a path inside the model's directory, got '{filename}'")


_LAST_NAME = re.compile(r"[A-Za-z_]\w*$")
_LAST_INDEX = re.compile(r"\[\d+\]$")


@dataclass(slots=True)
class Repair:
    """Edits that make a text parse. `doubtful` are the paths of fields whose values they lose."""

    is_possible: bool = True
    doubtful: set[str] = field(default_factory=set)
    _edits: list[tuple[int, int, str]] = field(default_factory=list)

    def cut(self, start: int, end: int, path: str) -> None:
        """Take a field out."""
        self._edits.append((start, end, " "))
        self.doubtful.add(_LAST_INDEX.sub("", path))

    def rename(self, start: int, end: int, name: str) -> None:
        """Read a misspelt field as the most likely field."""
        self._edits.append((start, end, name))

    def apply(self, text: str) -> str:
        """The text with all edits made."""
        for start, end, replacement in sorted(self._edits, reverse=True):
            text = text[:start] + replacement + text[end:]
        return text


def is_doubtful(problem: Problem, doubtful: Collection[str]) -> bool:
    """Whether a problem may be a consequence of an unreadable field in `doubtful`."""
    for path in doubtful:
        name = _LAST_NAME.search(path)
        if problem.field == path or problem.field.startswith((f"{path}.", f"{path}[")):
            return True
        if name is not None and re.search(rf"\b{name.group()}\b", f"{problem.message} {problem.hint or ''}"):
            return True
    return False
