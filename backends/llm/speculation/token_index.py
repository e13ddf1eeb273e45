"""Where the end of a text occurs elsewhere in a text: what followed there is a guess of what follows here."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

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
