"""The states of a model version and the rows of the repository index."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# The reason of a version that was unloaded on purpose.
UNLOADED = "unloaded"


class ModelState(enum.Enum):
    """The state of a version; the values are the index extension's words (UNKNOWN is left out there).

    UNKNOWN -> LOADING -> READY -> UNLOADING -> UNAVAILABLE, or LOADING -> UNAVAILABLE when a load fails.
    """

    UNKNOWN = "UNKNOWN"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Standing(enum.Enum):
    """Whether a model fulfils its last load or unload request.

    ABSENT -> SERVING or MISSING when its first load ends; SERVING <-> MISSING by reloads and, of an ensemble, by its
    models; either -> ABSENT by an unload.
    """

    ABSENT = "neither serves nor should"
    SERVING = "serves"
    MISSING = "should serve and does not"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One row of the index; `version` is None when no version of the model is known (yet).

    `reason` says why a version is not ready, or, on a ready one, why the last reload failed. `repository` is set
    if names alone do not identify models.
    """

    name: str
    version: int | None
    state: ModelState
    reason: str = ""
    repository: str = ""

    @property
    def is_absent(self) -> bool:
        """Whether the version is neither loaded nor being loaded: it was unloaded, or never loaded."""
        return self.state is ModelState.UNKNOWN or (self.state is ModelState.UNAVAILABLE and self.reason == UNLOADED)

    def __str__(self) -> str:
        version = "" if self.version is None else f"version {self.version} is "
        return f"{version}{self.state.value}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """The outcomes of one model's loads since the server started; the duration is that of the last load."""

    successes: int = 0
    failures: int = 0
    last_duration_s: float = 0.0
