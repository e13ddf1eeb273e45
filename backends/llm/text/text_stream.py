"""The text of one sequence as its tokens come: detokenised, and cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..sampling_params import SamplingParams
from .detokenizer import make_detokenizer

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class StopStrings:
    """The match that ends first wins, and of those the one that began first: so the pieces do not matter.

    `push` returns text that is certain to be before any match.
    """

    __slots__ = ("_first_characters", "_held", "_is_included", "_longest", "_stops", "_tail")

    def __init__(self, stops: Sequence[str], *, is_included: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._is_included = is_included
        # The last characters of the text, as many as a match may reach back; those at its end not given yet.
        self._tail = ""
        self._held = 0

    def push(self, text: str, *, is_exempt: bool = False) -> tuple[str, str | None]:
        """The text to give now, and the stop string that ended it. `is_exempt`: no match may end in this piece."""
        if not self._stops:
            return text, None
        if not text:
            return "", None
        searched = self._tail + text
        if not is_exempt and (found := self._find(searched, len(self._tail))):
            stop, start = found
            given_until = len(self._tail) - self._held
            end = start + len(stop) if self._is_included else start
            self._tail, self._held = "", 0
            # With an exempt piece before it, part of the match may have been given already.
            return searched[given_until : max(end, given_until)], stop
        given_until = len(self._tail) - self._held
        self._held = 0 if self._is_included else self._num_held(searched)
        self._tail = searched[max(0, len(searched) - self._longest + 1) :] if self._longest > 1 else ""
        return searched[given_until : len(searched) - self._held], None

    def flush(self) -> str:
        """The text held back, which did not become a match."""
        held, self._held = self._tail[len(self._tail) - self._held :], 0
        return held

    def _find(self, text: str, num_searched: int) -> tuple[str, int] | None:
        """The match that ends first of those that end past the first `num_searched` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_searched - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[2], best[1])

    def _num_held(self, text: str) -> int:
        """The length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            start = len(text) - length
            if text[start] in self._first_characters and any(
                len(stop) > length and stop.startswith(text[start:]) for stop in self._stops
            ):
                return length
        return 0


class TextStream:
    """All deltas together are the text. It follows the prompt: a space between both belongs to it.

    A stop string is looked for once more than `min_tokens` tokens are there, and must end after those.
    """

    __slots__ = ("_detokenizer", "_has_stops", "_min_tokens", "_num_tokens", "_stops")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = make_detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, is_included=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens if params.stop else 0
        self._num_tokens = 0
        self._has_stops = bool(params.stop)

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that ends the sequence here.

        After a match nothing may be pushed, and no text is held back.
        """
        if not self._has_stops:
            return self._detokenizer.push(token_ids), None
        if self._num_tokens < self._min_tokens:
            num_exempt = self._min_tokens - self._num_tokens
            self._num_tokens += len(token_ids)
            given, _ = self._stops.push(self._detokenizer.push(token_ids[:num_exempt]), is_exempt=True)
            if len(token_ids) <= num_exempt:
                return given, None
            more, stop = self._stops.push(self._detokenizer.push(token_ids[num_exempt:]))
            return given + more, stop
        return self._stops.push(self._detokenizer.push(token_ids))

    def flush(self) -> str:
        """The text held back, if the sequence ends without a stop string."""
        given, stop = self._stops.push(self._detokenizer.flush())
        return given if stop is not None else given + self._stops.flush()
