"""Constrained decoding by llguidance: schemas, regular expressions and grammars, with masks of microseconds."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import orjson

from modelserver.backend import InvalidArgumentError

from ..structured_outputs import Asked
from .gbnf import check_lark, lark_of
from .matcher import Bits, MaskBatch, set_bits
from .pace import Pace
from .patterns import library_pattern
from .schema_lowering import LoweredSchema, lowered

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

# White space between the elements of JSON. Where a model may break a line it may indent, but not for ever: a small one
# wanders in blanks.
MAX_INDENT = 16
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": rf"( |\n[ \t]{{0,{MAX_INDENT}}})?"}
_COMPACT_OPTIONS = {"whitespace_flexible": False}
# All escapes but \uXXXX, by which a key of `additionalProperties` could be one that is named.
_ESCAPES = 'nrbtf\\"'
# A step must not keep the others waiting: about 5 ms for the parser and 15 for the lexer. A lexer state takes 2 KiB.
_LIMITS = {
    "max_items_in_row": 20_000,
    "step_max_items": 100_000,
    "step_lexer_fuel": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# Masks that are worth more threads than one.
_MIN_PARALLEL = 2
# Steps that a grammar is tried for before it is used.
_NUM_TRIAL_STEPS = 8
# Rules without a text that are taken out of a schema, one after the other.
_MAX_PRUNED = 200
_WORDS = {"regex": "regular expression", "grammar": "grammar"}
_TOO_COMPLEX = re.compile("too many|limit|max is|fuel|too complex", re.IGNORECASE)
_AT_RULE = re.compile(r"while processing json-schema:///#/\$defs/(\w+)")
# Those that texts have: the others are no UTF-8.
_ALL_BYTES = {bytes((byte,)) for byte in range(0xF5) if byte not in (0xC0, 0xC1)}
_ANCHORS = {"Start": "'^' stands elsewhere than at the beginning", "End": "'$' stands elsewhere than at the end"}


class GuidanceCompiler:
    """Of one tokenizer; making it takes as long as reading the vocabulary does."""

    LIBRARY = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.library: Any = importlib.import_module(self.LIBRARY)
        vocabulary = _Vocabulary(tokenizer)
        self.eos_token_ids = sorted(tokenizer.eos_token_ids)
        self.size = tokenizer.vocab_size
        self.tokenizer = self.library.LLTokenizer(
            self.library.TokenizerWrapper(vocabulary), eos_token=self.eos_token_ids or [vocabulary.eos_token_id]
        )
        self.limits = self.library.LLParserLimits(**_LIMITS)
        self._executor: Any = None
        # Whether any text can be written; where not, a text may come to a point at which no token follows.
        self.is_byte_complete = _ALL_BYTES.issubset(tokenizer.visible_bytes)

    def compile(self, asked: Asked, pace: Pace) -> GuidanceGrammar:
        """InvalidArgumentError says what is wrong with it."""
        if asked.kind in ("json", "json_object"):
            return self._of_schema({"type": "object"} if asked.kind == "json_object" else asked.what, asked, pace)
        with pace:
            source = self._source(asked)
        return self._checked(GuidanceGrammar(self, source), _WORDS[asked.kind])

    def fill(self, states: list[tuple[Any, int]], bits: Bits) -> None:
        """Write the masks of matchers of the library to their rows; several side by side, without Python's lock.

        Where the library gives up, the text ends.
        """
        if len(states) < _MIN_PARALLEL:
            for state, row in states:
                state.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits.shape[1] * 4)
        else:
            if self._executor is None:
                self._executor = self.library.LLExecutor()
            self._executor.unsafe_compute_mask_ptr(states, bits.ctypes.data, bits.shape[1] * 4, len(bits))
        for state, row in states:
            if state.is_error():
                bits[row] = 0
                set_bits(bits[row], self.eos_token_ids)

    def _source(self, asked: Asked) -> str:
        if asked.kind == "regex":
            pattern = library_pattern(asked.what).replace("/", r"\/").replace("\n", r"\n")
            return self._lark(f"start: /{pattern}/")
        if "::=" in asked.what:
            return self._lark(lark_of(asked.what))
        check_lark(asked.what)
        return self._lark(asked.what)

    def _lark(self, text: str) -> str:
        """A grammar of the library, which asks for the tokens of what must follow unless they may not exist."""
        options = "" if self.is_byte_complete else '%llguidance {"no_forcing": true}\n'
        return str(self.library.LLMatcher.grammar_from_lark(options + text))

    def _of_schema(self, schema: Any, asked: Asked, pace: Pace) -> GuidanceGrammar:
        """Remove rules that match no text until the library accepts the rest: it refuses rules that name them."""
        with pace:
            schema_rules = lowered(schema, pace)
        for _ in range(_MAX_PRUNED):
            grammar = self._schema_grammar(schema_rules, asked.is_compact)
            error = grammar.error
            rule = _AT_RULE.search(error)
            if rule is None or not error.startswith("Unsatisfiable schema"):
                break
            with pace:
                pace.look()
                schema_rules = schema_rules.without({rule[1]})
        if error.startswith("Unsatisfiable schema"):
            raise InvalidArgumentError(f"structured output: no text matches the JSON schema: {_reason(error)}")
        if error:
            path = "#" if rule is None else schema_rules.paths.get(rule[1], "#")
            raise InvalidArgumentError(f"structured output: JSON schema at {path}: {_reason(error)}")
        return self._checked(grammar, "JSON schema")

    def _schema_grammar(self, schema_rules: LoweredSchema, is_compact: bool) -> GuidanceGrammar:
        document = schema_rules.document()
        text = orjson.dumps(document).decode()
        options: dict[str, Any] = dict(_COMPACT_OPTIONS if is_compact else _JSON_OPTIONS)
        if "\\u00" not in text:
            options["json_allowed_escapes"] = _ESCAPES
        if self.is_byte_complete:
            return GuidanceGrammar(self, self.library.LLMatcher.grammar_from_json_schema(text, overrides=options))
        text = orjson.dumps({**document, "x-guidance": options}).decode()
        return GuidanceGrammar(self, self._lark(f"start: %json {text}"))

    def _checked(self, grammar: GuidanceGrammar, kind: str) -> GuidanceGrammar:
        """A grammar that the library takes, and can follow for some steps."""
        if grammar.error:
            raise InvalidArgumentError(f"structured output: {kind}: {_reason(grammar.error)}")
        state = grammar.new_state()
        for step in range(_NUM_TRIAL_STEPS):
            bits = MaskBatch(1, self.size).bits
            if not state.is_stopped():
                self.fill([(state, 0)], bits)
            if _TOO_COMPLEX.search(state.get_error()):
                raise InvalidArgumentError(f"structured output: {kind} is too intricate: {_reason(state.get_error())}")
            token_id = _first_of(bits, self.eos_token_ids)
            if token_id is not None and not state.is_error():
                state.consume_token(token_id)
                continue
            if step == 0 and (state.is_error() or not state.is_accepting()):
                raise InvalidArgumentError(
                    f"structured output: no text matches the {kind}, or the model's vocabulary cannot write it"
                )
            break
        return grammar


def _first_of(bits: Bits, but: list[int]) -> int | None:
    for word in bits[0].nonzero()[0].tolist():
        value = int(bits[0, word])
        for bit in range(32):
            if value >> bit & 1 and word * 32 + bit not in but:
                return int(word * 32 + bit)
    return None


def _reason(error: str) -> str:
    """A message of the library for the author of the request, in one line."""
    if "error: " in error:  # of the library that reads regular expressions
        return error.rpartition("error: ")[2].strip().splitlines()[0]
    anchor = re.search(r"lookarounds not supported yet; (\w+)", error)
    if anchor is not None:
        return _ANCHORS.get(anchor[1], "word boundaries are not supported")
    lines = [line.strip() for line in error.strip().splitlines()]
    return lines[0][:300] if lines else "it is not supported"


class _Vocabulary:
    """The tokenizer for llguidance. One without an end-of-text token gets one that no model writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        ends = set(tokenizer.eos_token_ids)
        if not ends:
            ends = {len(self.tokens)}
            self.tokens.append(b"<end>")
        self.eos_token_id = min(ends)
        self.special_token_ids = sorted(tokenizer.special_ids | ends)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


class GuidanceGrammar:
    """See `Grammar`. `error` says why the library refuses it, if it does."""

    def __init__(self, compiler: GuidanceCompiler, source: str) -> None:
        self.compiler = compiler
        self._first = compiler.library.LLMatcher(compiler.tokenizer, source, log_level=0, limits=compiler.limits)
        self.error: str = self._first.get_error()

    def new_state(self) -> Any:
        return self._first.deep_copy()

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.new_state(), self.compiler)


class GuidanceMatcher:
    """See `Matcher`. Where the library gives up because a text has become too intricate, or because the vocabulary has
    no token that could follow, the text ends."""

    __slots__ = ("_compiler", "_has_ended", "_state")

    def __init__(self, state: Any, compiler: GuidanceCompiler) -> None:
        self._state = state
        self._compiler = compiler
        self._has_ended = False

    @property
    def vocab_size(self) -> int:
        return self._compiler.size

    @property
    def is_terminated(self) -> bool:
        return self._has_ended or bool(self._state.is_stopped()) or self._is_stuck()

    def accepts(self, token_id: int) -> bool:
        if token_id in self._compiler.eos_token_ids:
            return self._may_end()
        return not self._has_ended and token_id < self._compiler.size and self._state.validate_tokens([token_id]) == 1

    def accept(self, token_id: int) -> bool:
        if token_id in self._compiler.eos_token_ids or self._state.is_error():
            self._has_ended = self._may_end()
            return self._has_ended
        if not self.accepts(token_id):
            return False
        if not self._state.consume_token(token_id):
            self._has_ended = True
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            is_back = self._state.rollback(num_tokens)
            assert is_back, f"{num_tokens} tokens cannot be taken back: {self._state.get_error()}"

    def forced(self, num_tokens: int) -> list[int]:
        return [] if self.is_terminated else list(self._state.compute_ff_tokens()[:num_tokens])

    def fill(self, batch: MaskBatch, row: int) -> None:
        if self.is_terminated:
            set_bits(batch.bits[row], self._compiler.eos_token_ids)
        else:
            batch.defer(self._compiler.fill, self._state, row)

    def _may_end(self) -> bool:
        return self.is_terminated or bool(self._state.is_accepting())

    def _is_stuck(self) -> bool:
        """Whether the vocabulary has no token that could follow."""
        if self._compiler.is_byte_complete:
            return False
        bits = MaskBatch(1, self._compiler.size).bits
        self._compiler.fill([(self._state, 0)], bits)
        return bool(self._state.is_error()) or not bits.any()
