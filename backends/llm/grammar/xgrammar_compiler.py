"""xgrammar in place of our own automaton, where it is installed: masks of microseconds for the plainer schemas.

It passes over keywords that it does not know, and is generous with some that it does (strings with a length may have
control characters), so it is given only schemas that it takes at their word. All others are given to our own engine.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from ..structured_outputs import COMPACT
from .json_text import MAX_INDENT
from .matcher import Grammar, Mask

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

LIBRARY = "xgrammar"
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
# What a larger repetition costs it is time that nobody can stop.
_MAX_COUNT = 256
_MAX_DEPTH = 32


def is_installed() -> bool:
    return importlib.util.find_spec(LIBRARY) is not None


class XgrammarCompiler:
    """Of one tokenizer; making it takes as long as reading the vocabulary does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library: Any = importlib.import_module(LIBRARY)
        self._eos_token_ids = sorted(tokenizer.eos_token_ids)
        # Tokens that end a text, and those without one, are no part of it.
        vocabulary = [
            b"" if number in tokenizer.eos_token_ids else piece for number, piece in enumerate(tokenizer.visible_bytes)
        ]
        self._size = len(vocabulary)
        info = self._library.TokenizerInfo(
            vocabulary, self._library.VocabType.RAW, vocab_size=self._size, stop_token_ids=self._eos_token_ids
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, structured_outputs: Mapping[str, Any]) -> Grammar | None:
        """None: it has no word for this, refuses it, or would not take it at its word."""
        schema = _schema(structured_outputs)
        if schema is None or not _is_plain(schema):
            return None
        options: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": _MAX_WHITE_SPACE}
        if structured_outputs.get(COMPACT):
            options = {"any_whitespace": False, "separators": (",", ":")}
        try:
            compiled = self._compiler.compile_json_schema(orjson.dumps(schema).decode(), **options)
        except RuntimeError:  # its errors are of this class, and our own engine's say more
            return None
        return XgrammarGrammar(self._library, compiled, self._eos_token_ids, self._size)


def _schema(structured_outputs: Mapping[str, Any]) -> Any:
    for kind, what in structured_outputs.items():
        if kind == "json_object":
            return {"type": "object", "additionalProperties": True}
        if kind == "json":
            return orjson.loads(what) if isinstance(what, str) else what
    return None


def _is_plain(schema: Any, depth: int = 0) -> bool:
    """Whether it means to the library what it means to everybody."""
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

    def __init__(self, library: Any, compiled: Any, eos_token_ids: list[int], size: int) -> None:
        self._library = library
        self._compiled = compiled
        self.eos_token_ids = eos_token_ids
        self.size = size

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled), self)


class XgrammarMatcher:
    """See `Matcher`."""

    __slots__ = ("_bits", "_grammar", "_has_ended", "_mask", "_state")

    def __init__(self, state: Any, grammar: XgrammarGrammar) -> None:
        self._state = state
        self._grammar = grammar
        self._has_ended = False
        self._mask: Mask | None = None
        self._bits: npt.NDArray[np.int32] = np.zeros((1, -(-grammar.size // 32)), dtype=np.int32)

    @property
    def is_terminated(self) -> bool:
        if self._has_ended:
            return True
        mask = self.allowed_mask()
        return int(np.count_nonzero(mask)) == int(np.count_nonzero(mask[self._grammar.eos_token_ids]))

    def accepts(self, token_id: int) -> bool:
        return token_id < self._grammar.size and bool(self.allowed_mask()[token_id])

    def accept(self, token_id: int) -> bool:
        if not self.accepts(token_id):
            return False
        if token_id in self._grammar.eos_token_ids:
            self._has_ended = True
        else:
            is_taken = self._state.accept_token(token_id)
            assert is_taken, f"xgrammar allows token {token_id} and does not take it"
        self._mask = None
        return True

    def allowed_mask(self) -> Mask:
        if self._mask is None:
            mask = np.zeros(self._grammar.size, dtype=np.bool_)
            if self._has_ended:
                mask[self._grammar.eos_token_ids] = True
            else:
                self._state.fill_next_token_bitmask(self._bits)
                mask[:] = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")[: self._grammar.size]
            mask.setflags(write=False)
            self._mask = mask
        return self._mask
