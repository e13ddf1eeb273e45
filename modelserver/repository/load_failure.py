"""Loads that fail because of some versions: the reason of each, in the words that Triton's clients match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from modelserver.errors import ConfigError, InvalidArgumentError, ServerError

_KNOWN = ("failed to load", "load failed for model")


class CompletionError(InvalidArgumentError):
    """The backend could not read the files from which it completes an otherwise valid config, or the config needs
    something that the machine does not have.

    `versions` are the versions to serve, `reason` applies to each. `needs_change`: a retry does not help before the
    files are changed.
    """

    def __init__(self, error: ServerError, versions: Iterable[int]) -> None:
        super().__init__(error.message)
        self.reason = describe_failure(error)
        self.versions = tuple(versions)
        self.needs_change = isinstance(error, ConfigError)


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
