"""What a request wants of its text, compiled for a tokenizer: cached, and bounded in size and time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from modelserver.backend import InvalidArgumentError

from ..structured_outputs import COMPACT
from . import guidance, xgrammar_compiler
from .ebnf import grammar_rules
from .expression import Expression, one_of
from .json_schema import any_object_rules, schema_rules
from .json_text import without_space
from .matcher import Grammar, ProgramGrammar
from .pace import Pace
from .pattern import parse_pattern
from .program import ROOT, Program
from .token_trie import TokenTrie
from .unstoppable import TooManyCallsError, UnstoppableCalls

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

# Grammars that a tokenizer's compiler remembers, and what one may say (bytes of JSON).
_MAX_GRAMMARS = 128
_MAX_BYTES = 2**20
DEADLINE_S = 10.0
BUILTIN = "builtin"
# Calls of libraries at once: as many as compile side by side, and as many that hang.
_MAX_LIBRARY_CALLS = 8


class LibraryCompiler(Protocol):
    """A library of others, made ready for one tokenizer."""

    def compile(self, structured_outputs: Mapping[str, Any]) -> Grammar | None:
        """None: our own engine is to do it."""


# Those that know most of JSON Schema first.
_LIBRARIES: dict[str, Callable[[Tokenizer], LibraryCompiler]] = {
    guidance.LIBRARY: guidance.GuidanceCompiler,
    xgrammar_compiler.LIBRARY: xgrammar_compiler.XgrammarCompiler,
}
_IS_INSTALLED = {
    guidance.LIBRARY: guidance.is_installed,
    xgrammar_compiler.LIBRARY: xgrammar_compiler.is_installed,
}


def compile_grammar(
    structured_outputs: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    deadline_s: float = DEADLINE_S,
    library: str | None = None,
) -> Grammar:
    """The grammar of `{"json": schema}`, `{"json_object": true}`, `{"regex": "..."}`, `{"choice": [...]}` or
    `{"grammar": "..."}`. Beside the first two, `disable_any_whitespace: true` forbids blanks in JSON.

    `library`: "llguidance", "xgrammar", or "builtin" for our own engine; by default the first that is installed. Takes
    milliseconds to seconds, so not on an event loop; any thread may call. InvalidArgumentError says what is
    not supported, or that it is too large or takes longer than `deadline_s`.
    """
    if library is None:
        library = next((name for name, is_installed in _IS_INSTALLED.items() if is_installed()), BUILTIN)
    return _compiler_of(tokenizer).compile(structured_outputs, deadline_s, library)


# Guards that a tokenizer gets one compiler.
_FIRST = threading.Lock()


def _compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    with _FIRST:
        compiler = tokenizer.grammar_compiler
        if compiler is None:
            compiler = tokenizer.grammar_compiler = GrammarCompiler(tokenizer)
    assert isinstance(compiler, GrammarCompiler), f"{compiler} is no compiler of grammars"
    return compiler


class GrammarCompiler:
    """Of one tokenizer: its vocabulary as a trie, made once, and the grammars compiled last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Guards the trie and the cache; compiling goes on outside.
        self._lock = threading.Lock()
        self._trie: TokenTrie | None = None
        self._libraries: dict[str, LibraryCompiler] = {}
        self._grammars: OrderedDict[tuple[str, bytes], Grammar] = OrderedDict()
        self._library_calls: UnstoppableCalls[Grammar | None] = UnstoppableCalls(_MAX_LIBRARY_CALLS)

    def compile(self, structured_outputs: Mapping[str, Any], deadline_s: float, library: str) -> Grammar:
        key = library, _key(structured_outputs)
        with self._lock:
            found = self._grammars.get(key)
            if found is not None:
                self._grammars.move_to_end(key)
                return found
        deadline = time.monotonic() + deadline_s
        grammar = self._compile_with(key, structured_outputs, deadline) if library != BUILTIN else None
        if grammar is None:
            grammar = self._compile(structured_outputs, deadline)
        with self._lock:
            # Two threads may have compiled the same; the first result is the one that is shared.
            grammar = self._grammars.setdefault(key, grammar)
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _compile_with(
        self, key: tuple[str, bytes], structured_outputs: Mapping[str, Any], deadline: float
    ) -> Grammar | None:
        """By a library, which looks at no clock; None where our own engine is to do it."""
        if not self._tokenizer.eos_token_ids:
            return None  # they cannot do without
        library = key[0]
        with self._lock:
            compiler = self._libraries.get(library)
            if compiler is None:
                compiler = self._libraries[library] = _LIBRARIES[library](self._tokenizer)
        try:
            return self._library_calls.run(
                key, lambda: compiler.compile(structured_outputs), max(0.0, deadline - time.monotonic())
            )
        except TooManyCallsError:
            return None
        except TimeoutError:
            raise InvalidArgumentError("structured output: compiling what is asked for takes too long") from None

    def _compile(self, structured_outputs: Mapping[str, Any], deadline: float) -> Grammar:
        vocabulary = self._vocabulary()
        with Pace(deadline) as pace:
            pace.look()
            try:
                program = Program(_rules(structured_outputs, pace), pace=pace)
            except RecursionError:
                raise InvalidArgumentError("structured output: what is asked for nests too deeply") from None
            grammar = ProgramGrammar(program, vocabulary, self._tokenizer.eos_token_ids)
        if grammar.is_unwritable:
            raise InvalidArgumentError("structured output: the model's vocabulary cannot write what is asked for")
        return grammar

    def _vocabulary(self) -> TokenTrie:
        with self._lock:
            if self._trie is None:
                # Tokens that end a text are no part of it, even if they look like some.
                ends = self._tokenizer.eos_token_ids
                visible = self._tokenizer.visible_bytes
                self._trie = TokenTrie([b"" if number in ends else piece for number, piece in enumerate(visible)])
            return self._trie


def _key(structured_outputs: Mapping[str, Any]) -> bytes:
    try:
        key = orjson.dumps(structured_outputs, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise InvalidArgumentError(f"structured output: what is asked for is not JSON: {error}") from error
    if len(key) > _MAX_BYTES:
        raise InvalidArgumentError(f"structured output: what is asked for has {len(key)} bytes, {_MAX_BYTES} may be")
    return key


def _rules(structured_outputs: Mapping[str, Any], pace: Pace) -> dict[str, Expression]:
    given = {kind: what for kind, what in structured_outputs.items() if what is not None}
    is_compact = given.pop(COMPACT, False)
    if len(given) != 1:
        raise InvalidArgumentError(
            f"structured output: one of json, json_object, regex, choice, grammar is expected, got {list(given)}"
        )
    ((kind, what),) = given.items()
    if kind == "json":
        rules = schema_rules(orjson.loads(what) if isinstance(what, str | bytes) else what, pace)
        return without_space(rules) if is_compact else rules
    if kind == "json_object":
        return without_space(any_object_rules()) if is_compact else any_object_rules()
    if kind == "regex":
        return {ROOT: parse_pattern(what)}
    if kind == "choice":
        return {ROOT: one_of(text.encode() for text in what)}
    if kind == "grammar":
        return grammar_rules(what)
    raise InvalidArgumentError(f"structured output: {kind!r} is none of json, json_object, regex, choice, grammar")
