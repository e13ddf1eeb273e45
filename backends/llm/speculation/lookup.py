"""Guesses from texts: the prompt and what is written so far, and for suffixes past answers, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..sequence import Sequence as Generated
from .config import SpeculativeConfig
from .token_index import TokenIndex, most_frequent

# Of suffixes: shorter matches say too little.
_LEAST_SUFFIX = 2
# Tokens of past answers that are kept at most: about 100 bytes each.
_MOST_PAST_TOKENS = 1 << 20
# Stands between past answers; no token.
_GAP = -1


class Proposer(Protocol):
    """A way to guess."""

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        """Set the `drafts` of sequences, up to a number for each; all of their tokens but the last are computed."""
        ...

    def end(self, sequence: Generated) -> None:
        """A sequence has ended, with the tokens that it has."""
        ...

    def close(self) -> None: ...


class NgramProposer:
    """What followed the last occurrence of the longest end of a text that occurs earlier in it."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        for sequence, num_drafts in wanted:
            matches = _own_index(sequence, self._least).find(sequence.token_ids, self._most)
            sequence.drafts = most_frequent(matches[:1], num_drafts, 0.0)

    def end(self, sequence: Generated) -> None:
        pass

    def close(self) -> None:
        pass


class SuffixProposer:
    """What mostly followed the longest end of a text in it and in past answers of this engine.

    Sequences with a `cache_salt` neither see past answers nor leave theirs.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        # Two generations, of which the older is dropped when the newer has half of what may be kept.
        self._newer, self._older = TokenIndex([], _LEAST_SUFFIX), TokenIndex([], _LEAST_SUFFIX)
        self._num_newer = 0

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        config = self._config
        for sequence, num_drafts in wanted:
            own = _own_index(sequence, _LEAST_SUFFIX)
            indexes = [own] if sequence.cache_salt else [own, self._newer, self._older]
            matches = [match for index in indexes for match in index.find(sequence.token_ids, config.max_tree_depth)]
            longest = max((match.length for match in matches), default=0)
            matches = [match for match in matches if match.length == longest]
            most = min(num_drafts, int(config.max_spec_factor * longest))
            sequence.drafts = most_frequent(matches, most, config.min_token_prob)

    def end(self, sequence: Generated) -> None:
        most = self._config.max_cached_requests
        if not most or sequence.cache_salt or not sequence.num_output_tokens:
            return
        if self._num_newer >= -(-most // 2) or len(self._newer.token_ids) > _MOST_PAST_TOKENS // 2:
            self._newer, self._older = TokenIndex([], _LEAST_SUFFIX), self._newer
            self._num_newer = 0
        self._num_newer += 1
        # With the end of the prompt, so that the beginning of an answer is found again.
        self._newer.token_ids += sequence.token_ids[max(0, sequence.num_prompt_tokens - _LEAST_SUFFIX) :]
        self._newer.token_ids.append(_GAP)
        self._newer.update()

    def close(self) -> None:
        pass


def _own_index(sequence: Generated, width: int) -> TokenIndex:
    index: TokenIndex | None = sequence.token_index
    if index is None:
        index = sequence.token_index = TokenIndex(sequence.token_ids, width)
    index.update()
    return index
