"""The load levels to measure: a range from its start to its end, or by halving. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelserver.core.numerals import parse_float, parse_int
from modelserver.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class LoadRange:
    """`end` None is a single level, 0 no end: until the latency limit is passed."""

    start: float
    end: float | None = None
    step: float = 1

    @property
    def is_endless(self) -> bool:
        return self.end == 0


def parse_range(text: str, flag: str, *, is_whole: bool) -> LoadRange:
    """`start:end:step`. Raises InvalidArgumentError."""
    parts = text.split(":")
    try:
        numbers = [parse_int(part) if is_whole else parse_float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(map(math.isfinite, numbers)):
        kind = "whole numbers" if is_whole else "numbers"
        raise InvalidArgumentError(f"{flag} expects <start:end:step> of {kind}, got '{text}'")
    start = numbers[0]
    end = numbers[1] if len(numbers) > 1 else None
    step = numbers[2] if len(numbers) > 2 else 1
    if start <= 0 or step <= 0 or (end is not None and end != 0 and end < start):
        raise InvalidArgumentError(
            f"{flag} expects a start and step above 0 and an end of at least start, got '{text}'"
        )
    return LoadRange(start, end, step)


class Search(Protocol):
    """Gives levels, and learns after each whether it was within the latency limit."""

    def __iter__(self) -> Iterator[float]: ...

    def report(self, is_within_limit: bool) -> None:
        """Report the result of the last level."""


class LinearSearch:
    """From start to end; ends early at the first level over the limit."""

    def __init__(self, levels: LoadRange) -> None:
        self._levels = levels
        self._goes_on = True

    def __iter__(self) -> Iterator[float]:
        level, levels = self._levels.start, self._levels
        yield level
        if levels.end is None:
            return
        # Rounded: ten steps of 0.1 are 1.
        while self._goes_on and (levels.is_endless or round(level + levels.step, 9) <= levels.end):
            level = round(level + levels.step, 9)
            yield level

    def report(self, is_within_limit: bool) -> None:
        self._goes_on = is_within_limit


class ListSearch:
    """Given levels; ends early at the first one over the limit."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values
        self._goes_on = True

    def __iter__(self) -> Iterator[float]:
        for value in self._values:
            if not self._goes_on:
                return
            yield value

    def report(self, is_within_limit: bool) -> None:
        self._goes_on = is_within_limit


class BinarySearch:
    """Start, end, then the middle of the remaining range, until that is smaller than the step."""

    def __init__(self, levels: LoadRange, *, is_whole: bool) -> None:
        if levels.end is None or levels.is_endless:
            raise InvalidArgumentError("--binary-search needs a range with a start and an end")
        self._low = levels.start
        self._high = levels.end
        self._step = levels.step
        self._is_whole = is_whole
        self._is_within = True

    def __iter__(self) -> Iterator[float]:
        yield self._low
        if self._is_over():
            return
        yield self._high
        if not self._is_over():
            return
        while self._high - self._low > self._step:
            middle = (self._low + self._high) / 2
            middle = float(int(middle)) if self._is_whole else middle
            yield middle
            if self._is_over():
                self._high = middle
            else:
                self._low = middle

    def _is_over(self) -> bool:
        return not self._is_within

    def report(self, is_within_limit: bool) -> None:
        self._is_within = is_within_limit
