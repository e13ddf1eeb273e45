"""Guesses from texts: the prompt and what is written so far, and for suffixes past answers, too."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..sequence import Sequence as Generated
from .config import SpeculativeConfig

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


# Earlier places of a run of tokens that are looked at, the latest first.
_MOST_PLACES = 32
_NONE = -1


class Match(NamedTuple):
    """`length` tokens before `end` in `token_ids` are those at the end of another text."""

    token_ids: list[int]
    end: int
    length: int

    def following(self, index: int, drafts: Sequence[int]) -> int | None:
        """The token `index` places behind; in the text's own end, `drafts` go on with it: repetitions repeat."""
        place = self.end + index
        if place < len(self.token_ids):
            return self.token_ids[place]
        place -= len(self.token_ids)
        return drafts[place] if place < len(drafts) else None


class TokenIndex:
    """The places of each run of `width` tokens in a text that grows at its end. Adding a token takes constant time.

    Each place knows the one before it with the same run, so that the latest is found first.
    """

    def __init__(self, token_ids: list[int], width: int) -> None:
        self.token_ids = token_ids
        self._width = width
        self._latest: dict[int, int] = {}
        # Of each place (the end of a run): the place before it.
        self._previous = array("q", [_NONE] * width)

    def update(self) -> None:
        """Read what the text has gained."""
        token_ids, width, latest, previous = self.token_ids, self._width, self._latest, self._previous
        for end in range(max(len(previous), width), len(token_ids) + 1):
            key = hash(tuple(token_ids[end - width : end]))
            previous.append(latest.get(key, _NONE))
            latest[key] = end

    def find(self, text: list[int], most: int) -> list[Match]:
        """The longest matches of the end of `text`, of `width` to `most` tokens, the latest first; [] without any.

        `text` may be that of the index, which is up to date, or another.
        """
        width, size = self._width, len(text)
        if size < width:
            return []
        end = self._latest.get(hash(tuple(text[size - width :])), _NONE)
        if end == size and text is self.token_ids:
            end = self._previous[end]
        best: list[Match] = []
        longest = width
        for _ in range(_MOST_PLACES):
            if end == _NONE:
                break
            length = self._length(text, end, most)
            if length > longest:
                longest, best = length, []
            if length == longest:
                best.append(Match(self.token_ids, end, length))
            end = self._previous[end]
        return best

    def _length(self, text: list[int], end: int, most: int) -> int:
        token_ids, last = self.token_ids, len(text) - 1
        length, most = 0, min(most, end, last + 1)
        while length < most and token_ids[end - 1 - length] == text[last - length]:
            length += 1
        return length


def most_frequent(matches: Sequence[Match], num_drafts: int, least: float) -> list[int]:
    """The tokens that follow most of the matches, while their share of all matches is at least `least`."""
    drafts: list[int] = []
    left = list(matches)
    while left and len(drafts) < num_drafts:
        offers = [match.following(len(drafts), drafts) for match in left]
        counts = Counter(offer for offer in offers if offer is not None and offer >= 0)
        if not counts:
            break
        token_id, count = counts.most_common(1)[0]
        if count < least * len(matches):
            break
        drafts.append(token_id)
        left = [match for match, offer in zip(left, offers, strict=True) if offer == token_id]
    return drafts
