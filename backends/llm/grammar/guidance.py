"""llguidance in place of our own automaton, where it is installed: more of JSON Schema, and masks of microseconds.

Whatever it refuses is given to our own engine, whose error then tells what is not supported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from ..structured_outputs import COMPACT
from .json_text import MAX_INDENT
from .matcher import Grammar, Mask

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

LIBRARY = "llguidance"
# As much white space between the elements of JSON as our own rules allow.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": rf"( |\n[ \t]{{0,{MAX_INDENT}}})?"}
_COMPACT_OPTIONS = {"whitespace_flexible": False}


def is_installed() -> bool:
    return importlib.util.find_spec(LIBRARY) is not None


class GuidanceCompiler:
    """Of one tokenizer; making it takes as long as reading the vocabulary does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library: Any = importlib.import_module(LIBRARY)
        self._eos_token_ids = sorted(tokenizer.eos_token_ids)
        self._size = tokenizer.vocab_size
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=self._eos_token_ids
        )

    def compile(self, structured_outputs: Mapping[str, Any]) -> Grammar | None:
        """None: it has no word for this, or refuses it."""
        source = self._source(structured_outputs)
        if source is None or self._library.LLMatcher.validate_grammar(source, self._tokenizer):
            return None
        return GuidanceGrammar(self._library, self._tokenizer, source, self._eos_token_ids, self._size)

    def _source(self, structured_outputs: Mapping[str, Any]) -> str | None:
        matcher = self._library.LLMatcher
        options = _COMPACT_OPTIONS if structured_outputs.get(COMPACT) else _JSON_OPTIONS
        for kind, what in structured_outputs.items():
            if kind == "json" and isinstance(what, Mapping | str):
                schema = what if isinstance(what, str) else orjson.dumps(what).decode()
                return str(matcher.grammar_from_json_schema(schema, overrides=options))
            if kind == "json_object":
                return str(matcher.grammar_from_json_schema('{"type": "object"}', overrides=options))
            if kind == "regex":
                return str(matcher.grammar_from_regex(what))
        return None


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.eos_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


class GuidanceGrammar:
    """See `Grammar`."""

    def __init__(self, library: Any, tokenizer: Any, source: str, eos_token_ids: list[int], size: int) -> None:
        self._first = library.LLMatcher(tokenizer, source, log_level=0)
        self.eos_token_ids = eos_token_ids
        self.size = size

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._first.deep_copy(), self)


class GuidanceMatcher:
    """See `Matcher`. A matcher that the library gives up, which it does when a text becomes too intricate, ends."""

    __slots__ = ("_grammar", "_has_ended", "_mask", "_state")

    def __init__(self, state: Any, grammar: GuidanceGrammar) -> None:
        self._state = state
        self._grammar = grammar
        self._has_ended = False
        self._mask: Mask | None = None

    @property
    def is_terminated(self) -> bool:
        return self._has_ended or bool(self._state.is_stopped())

    def accepts(self, token_id: int) -> bool:
        if token_id in self._grammar.eos_token_ids:
            return self.is_terminated or bool(self._state.is_accepting())
        return not self._has_ended and token_id < self._grammar.size and self._state.validate_tokens([token_id]) == 1

    def accept(self, token_id: int) -> bool:
        if not self.accepts(token_id):
            return False
        self._mask = None
        if token_id in self._grammar.eos_token_ids:
            self._has_ended = True
            return True
        return bool(self._state.consume_token(token_id))

    def allowed_mask(self) -> Mask:
        if self._mask is None:
            mask = np.zeros(self._grammar.size, dtype=np.bool_)
            if not self.is_terminated:
                bits = np.unpackbits(np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8), bitorder="little")
                mask[:] = bits[: self._grammar.size]
            mask[self._grammar.eos_token_ids] = self.is_terminated or bool(self._state.is_accepting())
            mask.setflags(write=False)
            self._mask = mask
        return self._mask
