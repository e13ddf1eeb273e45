"""The text of one sequence as its tokens come: detokenised, and cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..sampling_params import SamplingParams
from .detokenizer import make_detokenizer
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


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

        After a match nothing may be pushed, and there is nothing to flush.
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
        """What was held back, when the sequence ends without a stop string."""
        given, stop = self._stops.push(self._detokenizer.flush())
        return given if stop is not None else given + self._stops.flush()
