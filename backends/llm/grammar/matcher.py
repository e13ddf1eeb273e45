"""Which tokens may come next in a text that follows a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .automaton import DEAD, Automaton
from .program import Program
from .token_trie import TokenTrie

Mask = npt.NDArray[np.bool_]

# When the automaton has so many configurations (a KiB each) it begins anew with those in use.
_MAX_CONFIGURATIONS = 16_384
# Masks that a grammar keeps, in bytes.
_MAX_MASK_BYTES = 64 * 2**20


class Matcher(Protocol):
    """The state of one sequence. `is_terminated`: nothing can follow, so the sequence ends."""

    @property
    def is_terminated(self) -> bool: ...

    def accepts(self, token_id: int) -> bool:
        """Whether a token may come next. End-of-sequence tokens may when the text is complete."""

    def accept(self, token_id: int) -> bool:
        """Take a token. False: it may not come next, and nothing has changed."""

    def allowed_mask(self) -> Mask:
        """Which tokens may come next, [vocabulary of the tokenizer]; not to be written to."""


class Grammar(Protocol):
    """What a text must be, compiled for one tokenizer. Its matchers are used from one thread at a time."""

    def matcher(self) -> Matcher: ...


class ProgramGrammar:
    """A grammar of our own engine: the automaton and masks that its matchers share."""

    def __init__(self, program: Program, trie: TokenTrie, eos_token_ids: Iterable[int]) -> None:
        self.trie = trie
        self.eos_token_ids = frozenset(eos_token_ids)
        self.automaton = Automaton(program)
        self._masks: dict[int, Mask] = {}
        self._max_masks = max(16, _MAX_MASK_BYTES // max(1, len(trie.vocabulary)))

    @property
    def is_unwritable(self) -> bool:
        """Whether no text of the grammar can even be begun with these tokens."""
        automaton = self.automaton
        if self.trie.is_byte_complete or automaton.configurations[automaton.start].is_complete:
            return False
        return not self.trie.allowed(automaton, automaton.start).any()

    def matcher(self) -> ProgramMatcher:
        return ProgramMatcher(self)

    def renew_if_large(self) -> None:
        """Forget all configurations once they take too much; matchers bring theirs over when they are next used."""
        if len(self.automaton.configurations) > _MAX_CONFIGURATIONS:
            self.automaton = Automaton(self.automaton.program)
            self._masks = {}

    def mask(self, number: int) -> Mask:
        """The tokens that may follow a configuration of the automaton."""
        mask = self._masks.get(number)
        if mask is None:
            mask = self.trie.allowed(self.automaton, number)
            eos = [token_id for token_id in self.eos_token_ids if token_id < len(mask)]
            # A vocabulary that lacks characters can come to a point where it cannot go on: then the text just ends.
            if self.automaton.configurations[number].is_complete or not mask.any():
                mask[eos] = True
            mask.setflags(write=False)
            if len(self._masks) >= self._max_masks:
                del self._masks[next(iter(self._masks))]
            self._masks[number] = mask
        return mask


class ProgramMatcher:
    """See `Matcher`."""

    __slots__ = ("_automaton", "_grammar", "_has_ended", "_number")

    def __init__(self, grammar: ProgramGrammar) -> None:
        self._grammar = grammar
        self._automaton = grammar.automaton
        self._number = self._automaton.start
        self._has_ended = False

    @property
    def is_terminated(self) -> bool:
        self._move()
        if self._has_ended or not self._automaton.configurations[self._number].places:
            return True
        return not self._grammar.trie.is_byte_complete and self._is_stuck()

    def accepts(self, token_id: int) -> bool:
        if self._has_ended:
            return token_id in self._grammar.eos_token_ids
        if token_id in self._grammar.eos_token_ids:
            return self._may_end()
        return self._after(token_id) != DEAD

    def accept(self, token_id: int) -> bool:
        if not self.accepts(token_id):
            return False
        if token_id in self._grammar.eos_token_ids:
            self._has_ended = True
            return True
        self._number = self._after(token_id)
        self._grammar.renew_if_large()
        return True

    def allowed_mask(self) -> Mask:
        self._move()
        return self._grammar.mask(self._number)

    def _may_end(self) -> bool:
        self._move()
        is_complete = self._automaton.configurations[self._number].is_complete
        return is_complete or (not self._grammar.trie.is_byte_complete and self._is_stuck())

    def _is_stuck(self) -> bool:
        """Whether no token goes on from here: what the mask has then is no more than the end."""
        mask, eos = self._grammar.mask(self._number), self._grammar.eos_token_ids
        return not any(token_id not in eos for token_id in np.flatnonzero(mask).tolist())

    def _after(self, token_id: int) -> int:
        """The configuration after a token; DEAD for one that may not come next, or that is no text."""
        self._move()
        vocabulary = self._grammar.trie.vocabulary
        if token_id >= len(vocabulary) or not vocabulary[token_id]:
            return DEAD
        number, following = self._number, self._automaton.next
        for byte in vocabulary[token_id]:
            number = following(number, byte)
            if number == DEAD:
                return DEAD
        return number

    def _move(self) -> None:
        """Follow the grammar to its newest automaton."""
        if self._automaton is not self._grammar.automaton:
            self._number = self._grammar.automaton.adopt(self._automaton, self._number)
            self._automaton = self._grammar.automaton
