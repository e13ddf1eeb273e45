"""Guesses by the client: the text that it expects as the answer (OpenAI's `prediction`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# Tokens of an answer that must follow each other in the prediction before the answer is taken to go on there.
_RUN = 2


class Prediction:
    """Where in the prediction one sequence is. An answer that leaves the prediction returns to it two tokens behind the
    difference, or one if it has as many tokens there as the prediction has.

    `num_accepted` and `num_rejected` count its tokens that a step has checked.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = array("i", token_ids)
        self._bytes = self._token_ids.tobytes()
        self._place = 0
        self._num_read = 0
        self._is_drafting = False
        self.num_accepted = self.num_rejected = 0

    def propose(self, token_ids: Sequence[int], *, num_prompt_tokens: int, num_drafts: int) -> list[int]:
        """Drafts for a sequence of these tokens: what the prediction says next, or nothing while the answer is
        elsewhere."""
        read = array("i", token_ids[num_prompt_tokens + self._num_read :])
        self._num_read += len(read)
        end = self._place + len(read)
        is_found = self._token_ids[self._place : end] == read
        self._place = end
        if not is_found and self._num_read >= _RUN:
            is_found = self._find(array("i", token_ids[-_RUN:]))
        drafts = self._token_ids[self._place : self._place + num_drafts].tolist() if is_found else []
        self._is_drafting = bool(drafts)
        return drafts

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Drafts of the sequence were checked. Only those of the prediction are counted."""
        if self._is_drafting:
            self.num_accepted += num_accepted
            self.num_rejected += num_drafts - num_accepted
        self._is_drafting = False

    def _find(self, run: array[int]) -> bool:
        """Go behind the next place with these tokens, or the first one if there is none further on."""
        wanted, size = run.tobytes(), run.itemsize
        for start in (self._place * size, 0):
            found = self._bytes.find(wanted, start)
            while found > 0 and found % size:
                found = self._bytes.find(wanted, found + 1)
            if found >= 0:
                self._place = found // size + len(run)
                return True
        return False
