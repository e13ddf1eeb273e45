"""The interface of an engine of constrained decoding: grammars, compiled for one tokenizer, and matchers of a text.

Masks are bit masks: bit `token_id % 32` of word `token_id // 32`. Ids past the tokenizer's vocabulary are never set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..structured_outputs import Asked
    from ..text.tokenizer import Tokenizer
    from .pace import Pace

Bits = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


class MaskBatch:
    """The masks of several matchers, uint32 [rows, words]; what an engine computes for many rows at once comes last."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.bits: Bits = np.zeros((num_rows, -(-vocab_size // 32)), dtype=np.uint32)
        self._deferred: dict[RowFiller, list[tuple[Any, int]]] = {}

    def defer(self, fill: RowFiller, state: Any, row: int) -> None:
        """Let `fill` write the row of a state, together with all others that are deferred to it."""
        self._deferred.setdefault(fill, []).append((state, row))

    def finish(self) -> Bits:
        for fill, states in self._deferred.items():
            fill(states, self.bits)
        return self.bits


# An engine's way to write the masks of its states to their rows.
RowFiller = Callable[[list[tuple[Any, int]], Bits], None]


class Matcher(Protocol):
    """The state of one sequence. Used by one thread at a time."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary of the tokenizer."""

    @property
    def is_terminated(self) -> bool:
        """Whether nothing can follow, so that the sequence ends."""

    def accepts(self, token_id: int) -> bool:
        """Whether a token may come next. End-of-sequence tokens may when the text is complete."""

    def accept(self, token_id: int) -> bool:
        """Take a token. False: it may not come next, and nothing has changed."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens, of which at least this many were accepted."""

    def forced(self, num_tokens: int) -> list[int]:
        """Up to that number of tokens that will most likely come next, as the text can go on in one way only."""

    def fill(self, batch: MaskBatch, row: int) -> None:
        """Write which tokens may come next to a row of zeros, at once or by `defer`."""


class Grammar(Protocol):
    """The required form of a text. Its matchers are used from one thread at a time."""

    def matcher(self) -> Matcher: ...


class GrammarEngine(Protocol):
    """A library, made ready for one tokenizer."""

    # As it is imported and installed.
    LIBRARY: str

    def __init__(self, tokenizer: Tokenizer) -> None: ...

    def compile(self, asked: Asked, pace: Pace) -> Grammar | None:
        """None: another engine is to do it. InvalidArgumentError says what is wrong with what is asked for."""


def fill_masks(matchers: Rows[Matcher]) -> Bits:
    """The masks of matchers of one tokenizer, uint32 [matchers, words]; engines compute theirs side by side."""
    batch = MaskBatch(len(matchers), matchers[0].vocab_size)
    for row, matcher in enumerate(matchers):
        matcher.fill(batch, row)
    return batch.finish()


def accepted_prefix(matcher: Matcher, token_ids: Rows[int]) -> list[int]:
    """The first of the tokens, as far as they may come one after the other. The matcher stays as it is."""
    num_accepted = 0
    for token_id in token_ids:
        if matcher.is_terminated or not matcher.accept(token_id):
            break
        num_accepted += 1
    matcher.rollback(num_accepted)
    return list(token_ids[:num_accepted])


def allowed_mask(matcher: Matcher) -> Mask:
    """Which tokens may come next, as booleans, [vocabulary of the tokenizer]."""
    return unpacked(fill_masks([matcher])[0], matcher.vocab_size)


def unpacked(row: Bits, size: int) -> Mask:
    """A row of a bit mask as booleans."""
    return np.unpackbits(row.view(np.uint8), count=size, bitorder="little").view(np.bool_)


def set_bits(row: Bits, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        row[token_id // 32] |= np.uint32(1 << (token_id % 32))
