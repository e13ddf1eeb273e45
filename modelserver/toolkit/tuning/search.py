"""Which candidate is measured next. Pure: candidates out, scores in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from modelserver.toolkit.tuning.candidate import Candidate
from modelserver.toolkit.tuning.space import KNOBS, Space

# A gain below this may be chance, and no reason to leave a setting.
MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """How good a candidate is; larger is better. One that meets the target beats all that do not; then inferences per
    second count, or, where no target is met, how far the latency is above it.
    """

    is_within: bool
    value: float

    def beats(self, other: Score | None) -> bool:
        """Whether it is better by more than chance."""
        if other is None or self.is_within != other.is_within:
            return other is None or self.is_within
        return self.value > other.value + abs(other.value) * MIN_GAIN


# The result of measuring a candidate; None if it could not be measured.
Scores = dict[Candidate, Score | None]
Search = Callable[[Space, Scores], Iterator[Candidate]]


def climb(space: Space, scores: Scores) -> Generator[Candidate, None, None]:
    """One knob after the other, from the model's own setting to the best value of each, until a round changes nothing.

    Before it is resumed, the score of the candidate that it gave is in `scores`.
    """
    best = space.start
    yield best
    while True:
        before = best
        for knob in KNOBS:
            at = best
            for candidate in space.along(knob, at):
                if candidate not in scores:
                    yield candidate
                score = scores.get(candidate)
                if score is not None and score.beats(scores.get(best)):
                    best = candidate
        if best == before:
            return


def everything(space: Space, scores: Scores) -> Generator[Candidate, None, None]:
    """The model's own setting, then every other."""
    del scores
    yield space.start
    yield from (candidate for candidate in space if candidate != space.start)


def winner(start: Candidate, scores: Scores) -> Candidate:
    """The best one; the model's own setting unless another is better by more than chance."""
    best = start
    for candidate, score in scores.items():
        if score is not None and score.beats(scores.get(best)):
            best = candidate
    return best
