"""The states of a model version and the rows of the repository index."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from modelserver.errors import ConfigError, InvalidArgumentError, ServerError

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


# Loads that fail because of some versions: the reason of each, in the words that Triton's clients match.
_KNOWN = ("failed to load", "load failed for model")


class CompletionError(InvalidArgumentError):
    """The backend could not read the files from which it completes an otherwise valid config, or the config needs
    something that the machine does not have.

    `versions` are the versions to serve, `reason` applies to each. `needs_change`: a retry does not help before the
    files are changed. `retry_after_s`: the model is loaded again after this time, because it waits for something else.
    """

    def __init__(self, error: ServerError, versions: Iterable[int]) -> None:
        super().__init__(error.message)
        self.reason = describe_failure(error)
        self.versions = tuple(versions)
        self.needs_change = isinstance(error, ConfigError)
        self.retry_after_s = error.retry_after_s


class VersionsFailedError(InvalidArgumentError):
    """Some versions could not be loaded: `reasons` by version; `needs_change` as above."""

    def __init__(self, name: str, reasons: Mapping[int, str], *, needs_change: bool = False) -> None:
        self.reasons = dict(reasons)
        self.needs_change = needs_change
        chain = " ".join(f"version {version} is at UNAVAILABLE state: {reason};" for version, reason in reasons.items())
        super().__init__(f"load failed for model '{name}': {chain}")


@contextmanager
def named_failure(name: str) -> Iterator[None]:
    """Prefix the error's message with "failed to load", which Triton's clients match.

    The error object stays the same: other callers may wait for the same load and get the same error.
    """
    try:
        yield
    except ServerError as error:
        if not error.message.startswith(_KNOWN):
            error.message = f"failed to load '{name}', {error.message}"
            error.args = (error.message,)
        raise


def describe_failure(error: ServerError) -> str:
    """`<Code>: <reason>` with Triton's name of the code."""
    return f"{error.code.value.replace('_', ' ').capitalize()}: {error.message}"
