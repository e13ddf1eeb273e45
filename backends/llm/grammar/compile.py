"""Compiles the structured output of requests for a tokenizer: cached, and bounded in size and time."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from modelserver.backend import CancelledError, InvalidArgumentError, UnavailableError, UnsupportedError

from ..structured_outputs import Asked
from .choices import ChoiceGrammar, Vocabulary
from .guidance import GuidanceCompiler
from .matcher import Grammar, GrammarEngine
from .pace import Pace
from .xgrammar_compiler import XgrammarCompiler

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

# Grammars that a tokenizer's compiler remembers, and what one may say (bytes of JSON).
_MAX_GRAMMARS = 128
_MAX_BYTES = 2**20
DEADLINE_S = 10.0
# Calls of libraries at once: as many as compile side by side, and as many that hang.
_MAX_LIBRARY_CALLS = 8

GUIDANCE = "guidance"
# By the names that users give them; the first that is installed is the default, and it also gets what another leaves.
ENGINES: dict[str, type[GrammarEngine]] = {GUIDANCE: GuidanceCompiler, "xgrammar": XgrammarCompiler}


def compile_grammar(
    structured_outputs: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    deadline_s: float = DEADLINE_S,
    engine: str | None = None,
    is_cancelled: threading.Event | None = None,
) -> Grammar:
    """The grammar of `{"json": schema}`, `{"json_object": true}`, `{"regex": "..."}`, `{"choice": [...]}` or
    `{"grammar": "..."}`. Beside the first two, `disable_any_whitespace: true` forbids blanks in JSON.

    `engine`: "guidance" or "xgrammar"; by default the first that is installed. Takes milliseconds to seconds, so not
    on an event loop; any thread may call. InvalidArgumentError says what is not supported, or that it is too large or
    takes longer than `deadline_s`; UnsupportedError names the library that is missing; CancelledError follows
    `is_cancelled`.
    """
    return _compiler_of(tokenizer).compile(structured_outputs, deadline_s, engine or default_engine(), is_cancelled)


def is_installed(engine: str) -> bool:
    return importlib.util.find_spec(ENGINES[engine].LIBRARY) is not None


def default_engine() -> str:
    return next((name for name in ENGINES if is_installed(name)), GUIDANCE)


# Guards that a tokenizer gets one compiler.
_FIRST = threading.Lock()


def _compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    with _FIRST:
        compiler = tokenizer.grammar_compiler
        if compiler is None:
            compiler = tokenizer.grammar_compiler = GrammarCompiler(tokenizer)
    assert isinstance(compiler, GrammarCompiler), f"{compiler} does not compile grammars"
    return compiler


class GrammarCompiler:
    """The state of one tokenizer: the engines' forms of its vocabulary, and the grammars compiled last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Guards the cache.
        self._lock = threading.Lock()
        # Guards that each engine is made once; making one takes as long as reading the vocabulary does.
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._engines: dict[str, GrammarEngine] = {}
        self._grammars: OrderedDict[tuple[str, bytes], Grammar] = OrderedDict()
        self._calls: UnstoppableCalls[Grammar] = UnstoppableCalls(_MAX_LIBRARY_CALLS)

    def compile(
        self,
        structured_outputs: Mapping[str, Any],
        deadline_s: float,
        engine: str,
        is_cancelled: threading.Event | None = None,
    ) -> Grammar:
        key = engine, _key(structured_outputs)
        with self._lock:
            found = self._grammars.get(key)
            if found is not None:
                self._grammars.move_to_end(key)
                return found
        asked = Asked.of(structured_outputs)
        if asked.kind == "choice":
            grammar: Grammar = ChoiceGrammar(asked.what, self._own_vocabulary())
        else:
            self._engine(engine)  # outside the request's time limit: the first request should not pay for it
            deadline = time.monotonic() + deadline_s
            Pace(deadline, is_cancelled).look()
            grammar = self._compile_beside(key, asked, deadline, is_cancelled)
        with self._lock:
            # Two threads may have compiled the same; the first result is the one that is shared.
            grammar = self._grammars.setdefault(key, grammar)
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _compile_beside(
        self, key: tuple[str, bytes], asked: Asked, deadline: float, is_cancelled: threading.Event | None
    ) -> Grammar:
        """By a library, which looks at no clock, so that this thread does not wait for it for ever."""

        def compile_it(is_abandoned: threading.Event) -> Grammar:
            return self._compile_with(key[0], asked, Pace(deadline, is_abandoned))

        try:
            return self._calls.run(key, compile_it, max(0.0, deadline - time.monotonic()), is_cancelled)
        except TooManyCallsError:
            raise UnavailableError(
                f"structured output: {_MAX_LIBRARY_CALLS} grammars are being compiled, which is as many as may be"
            ) from None
        except TimeoutError:
            raise InvalidArgumentError(
                "structured output: compiling the constraint takes too long; simplify it"
            ) from None
        except RecursionError:
            raise InvalidArgumentError("structured output: the constraint is nested too deeply; flatten it") from None

    def _compile_with(self, name: str, asked: Asked, pace: Pace) -> Grammar:
        grammar = self._engine(name).compile(asked, pace)
        if grammar is None:
            grammar = self._engine(GUIDANCE).compile(asked, pace)
        assert grammar is not None, f"{GUIDANCE} leaves nothing to others"
        return grammar

    def _engine(self, name: str) -> GrammarEngine:
        if name not in ENGINES:
            raise InvalidArgumentError(f"structured output: engine {name!r} is none of {', '.join(ENGINES)}")
        library = ENGINES[name].LIBRARY
        if not is_installed(name):
            extra = " or 'modelserver-py[llm]'" if name == GUIDANCE else ""
            raise UnsupportedError(
                f"structured output: this needs {library}, which is not installed: pip install {library}{extra}"
            )
        with self._making:
            engine = self._engines.get(name)
            if engine is None:
                engine = self._engines[name] = ENGINES[name](self._tokenizer)
        return engine

    def _own_vocabulary(self) -> Vocabulary:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer)
        return self._vocabulary


def _key(structured_outputs: Mapping[str, Any]) -> bytes:
    try:
        key = orjson.dumps(structured_outputs, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise InvalidArgumentError(f"structured output: what is asked for is not JSON: {error}") from error
    if len(key) > _MAX_BYTES:
        raise InvalidArgumentError(f"structured output: what is asked for has {len(key)} bytes, {_MAX_BYTES} may be")
    return key


# Calls of libraries that cannot be interrupted: waited for up to a limit, and then left to end alone.
#
# Their threads are not waited for when the server ends, and their number is bounded: what hangs in a library costs no
# more than these.

Result = TypeVar("Result")
# How often a caller looks whether the result is still wanted.
_LOOK_S = 0.05


class TooManyCallsError(Exception):
    """The limit of concurrent calls is reached: most of them hang."""


class _Call(Generic[Result]):
    """One call, for which several may wait."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.is_abandoned = threading.Event()
        self.num_waiting = 0
        self.result: Result | None = None
        self.error: BaseException | None = None


class UnstoppableCalls(Generic[Result]):
    """At most `max_calls` at once, one for each key. From any thread."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._lock = threading.Lock()  # guards the calls and how many wait for each
        self._calls: dict[Hashable, _Call[Result]] = {}

    def run(
        self,
        key: Hashable,
        function: Callable[[threading.Event], Result],
        timeout_s: float,
        is_cancelled: threading.Event | None = None,
    ) -> Result:
        """Call the function, or join a call with this key that is under way, and return or raise its result.

        The function gets an event that is set when its last waiter has left. TimeoutError when it takes longer,
        TooManyCallsError when it is one too many, CancelledError when `is_cancelled` is set meanwhile.
        """
        while True:
            call = self._join(key, function)
            try:
                self._wait(call, time.monotonic() + timeout_s, is_cancelled)
            finally:
                self._leave(call)
            if isinstance(call.error, CancelledError):
                continue  # it had been given up before this caller came
            if call.error is not None:
                raise call.error
            return call.result  # type: ignore[return-value]  # it is there when there is no error

    def _join(self, key: Hashable, function: Callable[[threading.Event], Result]) -> _Call[Result]:
        """The call of a key, begun if it is not under way."""
        with self._lock:
            call = self._calls.get(key)
            if call is None:
                if len(self._calls) >= self._max_calls:
                    raise TooManyCallsError
                call = self._calls[key] = _Call()
                arguments = (key, call, function)
                threading.Thread(target=self._run, args=arguments, name="llm-grammar-library", daemon=True).start()
            call.num_waiting += 1
            call.is_abandoned.clear()
            return call

    @staticmethod
    def _wait(call: _Call[Result], deadline: float, is_cancelled: threading.Event | None) -> None:
        while not call.has_ended.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            if is_cancelled is not None and is_cancelled.is_set():
                raise CancelledError("structured output: the request was cancelled")
            if time.monotonic() >= deadline:
                raise TimeoutError

    def _leave(self, call: _Call[Result]) -> None:
        with self._lock:
            call.num_waiting -= 1
            if not call.num_waiting:
                call.is_abandoned.set()

    def _run(self, key: Hashable, call: _Call[Result], function: Callable[[threading.Event], Result]) -> None:
        try:
            call.result = function(call.is_abandoned)
        except BaseException as error:  # raised where the result is waited for; panics of Rust are no Exceptions
            call.error = error
        with self._lock:
            del self._calls[key]
        call.has_ended.set()
