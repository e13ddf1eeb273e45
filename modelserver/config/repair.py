"""Removes the mistakes from a config text, so that the rest can be validated in the same run."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from modelserver.config.problem import Problem

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
