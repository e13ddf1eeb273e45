"""Loads on demand that failed: the model is tried again after a while, a longer one each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelserver.errors import ServerError, UnavailableError

# The first pause, doubled each time up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class _Failure:
    count: int
    until_s: float
    reason: str


class Backoff:
    """By key. Event loop thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, _Failure] = {}

    def note(self, key: str, error: ServerError) -> UnavailableError:
        """The model could not be loaded: what to tell who asked for it, and did nothing wrong."""
        before = self._failures.get(key)
        count = before.count + 1 if before is not None else 1
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(count - 1, 30), _LONGEST_PAUSE_S)
        self._failures[key] = _Failure(count, self._clock() + pause_s, error.message)
        told = UnavailableError(error.message)
        told.retry_after_s = pause_s
        return told

    def forget(self, key: str) -> None:
        """It serves, or somebody has asked for it who knows better."""
        self._failures.pop(key, None)

    def refusal(self, key: str, name: str) -> UnavailableError | None:
        """What to tell who asks for the model, by this name, before it is tried again; None: it may be tried."""
        failure = self._failures.get(key)
        left_s = failure.until_s - self._clock() if failure is not None else 0.0
        if failure is None or left_s <= 0:
            return None
        error = UnavailableError(
            f"model '{name}' could not be loaded on demand, {failure.count} times in a row, and is tried again in "
            f"{left_s:.1f} s: {failure.reason}"
        )
        error.retry_after_s = left_s
        return error
