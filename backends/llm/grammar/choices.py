"""One of several texts: an engine of our own, because it needs no library and no more than a sorted list."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from modelserver.backend import InvalidArgumentError

from .matcher import MaskBatch, set_bits

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

# States of a grammar whose tokens are remembered.
_MAX_STATES = 4096


class Vocabulary:
    """Tokens by what they write, made once for a tokenizer. Tokens that end a text, or are special, write nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_ids = sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < tokenizer.vocab_size)
        self.pieces = tuple(
            b"" if token_id in tokenizer.eos_token_ids else piece
            for token_id, piece in enumerate(tokenizer.visible_bytes)
        )
        self._max_len = max(map(len, self.pieces), default=0)
        self._ids: dict[bytes, list[int]] = {}
        for token_id, piece in enumerate(self.pieces):
            if piece:
                self._ids.setdefault(piece, []).append(token_id)

    def piece(self, token_id: int) -> bytes:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def beginnings(self, text: bytes, start: int = 0) -> Iterator[int]:
        """The tokens that the rest of a text may begin with, the shortest first."""
        for length in range(1, min(self._max_len, len(text) - start) + 1):
            yield from self._ids.get(text[start : start + length], ())


class _State(NamedTuple):
    """The texts from `low` to `high` are possible, and `start` bytes of them are written."""

    low: int
    high: int
    start: int


class ChoiceGrammar:
    """See `Grammar`. InvalidArgumentError: the vocabulary cannot begin any of the texts."""

    def __init__(self, texts: Iterable[str], vocabulary: Vocabulary) -> None:
        self.texts = sorted({text.encode() for text in texts})
        self.vocabulary = vocabulary
        self.first = _State(0, len(self.texts), 0)
        self._following: dict[_State, frozenset[int]] = {}
        if not self.is_complete(self.first) and not self.following(self.first):
            raise InvalidArgumentError("structured output: the model's vocabulary cannot write any of the choices")

    def matcher(self) -> ChoiceMatcher:
        return ChoiceMatcher(self)

    def is_complete(self, state: _State) -> bool:
        """Whether one of the texts is written; it is the first of those that begin with it."""
        return state.low < state.high and len(self.texts[state.low]) == state.start

    def following(self, state: _State) -> frozenset[int]:
        """The tokens that may come next."""
        found = self._following.get(state)
        if found is None:
            texts = self.texts[state.low : state.high]
            found = frozenset(each for text in texts for each in self.vocabulary.beginnings(text, state.start))
            if len(self._following) >= _MAX_STATES:
                del self._following[next(iter(self._following))]
            self._following[state] = found
        return found

    def forced(self, state: _State, num_tokens: int) -> list[int]:
        """What all possible texts go on with, in the longest tokens."""
        if state.low >= state.high:
            return []
        text, last = self.texts[state.low], self.texts[state.high - 1]
        text = text[: next((at for at, pair in enumerate(zip(text, last, strict=False)) if pair[0] != pair[1]), None)]
        token_ids: list[int] = []
        start = state.start
        while start < len(text) and len(token_ids) < num_tokens:
            found = list(self.vocabulary.beginnings(text, start))
            if not found:
                break
            token_ids.append(found[-1])
            start += len(self.vocabulary.piece(found[-1]))
        return token_ids

    def after(self, state: _State, piece: bytes) -> _State:
        """Where a token leads that may come next."""
        start = state.start + len(piece)
        written = self.texts[state.low][: state.start] + piece
        low = bisect_left(self.texts, written, state.low, state.high)
        return _State(low, bisect_right(self.texts, written, low, state.high, key=lambda text: text[:start]), start)


class ChoiceMatcher:
    """See `Matcher`. `_states` has one for each token so far, after the first."""

    __slots__ = ("_grammar", "_has_ended", "_states")

    def __init__(self, grammar: ChoiceGrammar) -> None:
        self._grammar = grammar
        self._states = [grammar.first]
        self._has_ended = False

    @property
    def vocab_size(self) -> int:
        return len(self._grammar.vocabulary.pieces)

    @property
    def is_terminated(self) -> bool:
        return not self._following()

    def accepts(self, token_id: int) -> bool:
        if token_id in self._grammar.vocabulary.eos_token_ids:
            return self._may_end()
        return token_id in self._following()

    def accept(self, token_id: int) -> bool:
        if not self.accepts(token_id):
            return False
        if token_id in self._grammar.vocabulary.eos_token_ids:
            self._has_ended = True
        else:
            self._states.append(self._grammar.after(self._states[-1], self._grammar.vocabulary.piece(token_id)))
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        assert num_tokens < len(self._states), f"{num_tokens} tokens to take back, {len(self._states) - 1} are there"
        if num_tokens:
            del self._states[-num_tokens:]

    def forced(self, num_tokens: int) -> list[int]:
        return [] if self._has_ended else self._grammar.forced(self._states[-1], num_tokens)

    def fill(self, batch: MaskBatch, row: int) -> None:
        set_bits(batch.bits[row], self._following())
        if self._may_end():
            set_bits(batch.bits[row], self._grammar.vocabulary.eos_token_ids)

    def _following(self) -> frozenset[int]:
        return frozenset() if self._has_ended else self._grammar.following(self._states[-1])

    def _may_end(self) -> bool:
        """Where a text is complete, or cannot go on because the vocabulary lacks its characters."""
        return self._has_ended or self._grammar.is_complete(self._states[-1]) or not self._following()
