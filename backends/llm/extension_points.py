"""Extensions of this backend by installed packages, through entry points."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from modelserver.backend import UnavailableError


def load_extension(group: str, name: str) -> Any | None:
    """The object of the entry point `name` in `group`; None without one.

    Raises UnavailableError if it cannot be imported.
    """
    for entry_point in importlib.metadata.entry_points(group=group, name=name):
        try:
            return entry_point.load()
        except Exception as error:  # whatever a foreign module raises
            raise UnavailableError(
                f"the entry point {name} = {entry_point.value} in {group} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
    return None


def extension_names(group: str) -> list[str]:
    """The names that installed packages add in `group`."""
    return sorted({entry_point.name for entry_point in importlib.metadata.entry_points(group=group)})
