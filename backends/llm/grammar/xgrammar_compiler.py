"""xgrammar, where it is chosen or llguidance is not there: masks of microseconds for the plainer schemas.

It passes over keywords that it does not know, and is generous with some that it does (strings with a length may have
control characters), so it is given only schemas that it takes at their word. All others are left to llguidance.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from ..structured_outputs import Asked
from .guidance import MAX_INDENT
from .matcher import Bits, Grammar, MaskBatch, set_bits
from .pace import Pace

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

# White space between the elements of JSON: a line break and its indentation, and not for ever.
_MAX_WHITE_SPACE = 1 + MAX_INDENT
# Keywords of schemas, by what their values hold: a schema, several by name, a list of them, a count, or no schema.
_SCHEMAS = frozenset({"items"})
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions"})
_LISTED_SCHEMAS = frozenset({"anyOf", "prefixItems"})
_COUNTS = frozenset({"minItems", "maxItems"})
_OTHERS = frozenset({"type", "required", "enum", "const", "$ref", "additionalProperties"})
_WITHOUT_EFFECT = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"})
_ALONE = ("anyOf", "$ref", "enum", "const")
# Larger repetitions take long, and cannot be interrupted.
_MAX_COUNT = 256
_MAX_DEPTH = 32


class XgrammarCompiler:
    """Of one tokenizer; making it takes as long as reading the vocabulary does."""

    LIBRARY = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library: Any = importlib.import_module(self.LIBRARY)
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(tokenizer.eos_token_ids)
        # Tokens that end a text, and those without one, are no part of it.
        vocabulary = [
            b"" if number in tokenizer.eos_token_ids else piece for number, piece in enumerate(tokenizer.visible_bytes)
        ]
        info = self._library.TokenizerInfo(
            vocabulary, self._library.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=self._eos_token_ids
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, asked: Asked, pace: Pace) -> Grammar | None:
        """None: it has no word for this, refuses it, or would not take it at its word."""
        schema = {"type": "object", "additionalProperties": True} if asked.kind == "json_object" else asked.what
        if asked.kind not in ("json", "json_object") or not self._eos_token_ids or not _is_plain(schema):
            return None
        pace.look()
        options: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": _MAX_WHITE_SPACE}
        if asked.is_compact:
            options = {"any_whitespace": False, "separators": (",", ":")}
        try:
            compiled = self._compiler.compile_json_schema(orjson.dumps(schema).decode(), **options)
        except RuntimeError:  # its errors are of this class, and llguidance's say more
            return None
        return XgrammarGrammar(self._library, compiled, self._tokenizer, self._eos_token_ids)


def _is_plain(schema: Any, depth: int = 0) -> bool:
    """Whether the library interprets the expression in the usual way."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return False
    words = schema.keys() - _WITHOUT_EFFECT - {"$defs", "definitions"}
    if any(word in words for word in _ALONE):
        beside = words - {"type"} if "enum" in words or "const" in words else words
        if len(beside) != 1:
            return False
    elif not isinstance(schema.get("type"), str):
        return False
    return all(_is_plain_member(keyword, value, depth + 1) for keyword, value in schema.items())


def _is_plain_member(keyword: str, value: Any, depth: int) -> bool:
    if keyword in _SCHEMAS or (keyword == "additionalProperties" and not isinstance(value, bool)):
        return _is_plain(value, depth)
    if keyword in _NAMED_SCHEMAS:
        return isinstance(value, Mapping) and all(_is_plain(each, depth) for each in value.values())
    if keyword in _LISTED_SCHEMAS:
        return isinstance(value, list) and bool(value) and all(_is_plain(each, depth) for each in value)
    if keyword in _COUNTS:
        return type(value) is int and 0 <= value <= _MAX_COUNT
    return keyword in _OTHERS or keyword in _WITHOUT_EFFECT


class XgrammarGrammar:
    """See `Grammar`."""

    def __init__(self, library: Any, compiled: Any, tokenizer: Tokenizer, eos_token_ids: list[int]) -> None:
        self._library = library
        self._compiled = compiled
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled), self)

    def fill(self, states: list[tuple[Any, int]], bits: Bits) -> None:
        """Write the masks of matchers of the library to their rows."""
        rows = bits.view(np.int32)
        for state, row in states:
            state.fill_next_token_bitmask(rows, row)


class XgrammarMatcher:
    """See `Matcher`."""

    __slots__ = ("_bits", "_grammar", "_has_ended", "_state")

    def __init__(self, state: Any, grammar: XgrammarGrammar) -> None:
        self._state = state
        self._grammar = grammar
        self._has_ended = False
        # The mask of this state, once it is known.
        self._bits: Bits | None = None

    @property
    def vocab_size(self) -> int:
        return self._grammar.tokenizer.vocab_size

    @property
    def is_terminated(self) -> bool:
        if self._has_ended:
            return True
        rest = self._mask().copy()
        for token_id in self._grammar.eos_token_ids:
            rest[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return not rest.any()

    def accepts(self, token_id: int) -> bool:
        if token_id in self._grammar.eos_token_ids and self._has_ended:
            return True
        return token_id < self.vocab_size and bool(self._mask()[token_id // 32] >> np.uint32(token_id % 32) & 1)

    def accept(self, token_id: int) -> bool:
        if not self.accepts(token_id):
            return False
        if token_id in self._grammar.eos_token_ids:
            self._has_ended = True
        else:
            is_taken = self._state.accept_token(token_id)
            assert is_taken, f"xgrammar allows token {token_id} and does not take it"
        self._bits = None
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._state.rollback(num_tokens)
        self._bits = None

    def forced(self, num_tokens: int) -> list[int]:
        text = "" if self._has_ended else self._state.find_jump_forward_string()
        return self._grammar.tokenizer.encode(text, add_special_tokens=False)[:num_tokens] if text else []

    def fill(self, batch: MaskBatch, row: int) -> None:
        batch.bits[row] = self._mask()

    def _mask(self) -> Bits:
        if self._bits is None:
            batch = MaskBatch(1, self.vocab_size)
            if self._has_ended:
                set_bits(batch.bits[0], self._grammar.eos_token_ids)
            else:
                self._grammar.fill([(self._state, 0)], batch.bits)
            self._bits = batch.bits[0]
        return self._bits
