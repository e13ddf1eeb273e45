"""Requests whose grammar is being compiled, on other threads than the engine's, so that other requests do not wait."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelserver.backend import InternalError, ServerError

from .generation import GenerationRequest
from .structured_outputs import with_default

if TYPE_CHECKING:
    from .grammar import Grammar
    from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# How long a request's grammar is waited for when the request is added: most are there long before, and what is wrong
# with the others is then said at once.
PATIENCE_S = 0.05
# How long an engine that has nothing else to do waits for one, before it looks for other requests again.
IDLE_S = 0.01
# So many slow grammars at once before one that is quick, or known, has to wait for them.
NUM_THREADS = 4


@dataclass(slots=True)
class _Compilation:
    """A grammar on its way."""

    future: Future[Grammar]
    is_cancelled: threading.Event


class GrammarQueue:
    """Called from the engine's thread. The threads that compile begin with the first grammars and end with `close`.

    The caller bounds the number of requests, as for the engine; a grammar is compiled within its own time limit.
    `is_compact`: JSON has no blanks between its elements, unless a request says otherwise. `engine`: the name of what
    compiles them, None for what is installed.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_compact: bool = False, engine: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._is_compact = is_compact
        self._engine = engine
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="llm-grammar")
        self._compilations: dict[GenerationRequest, _Compilation] = {}

    def __len__(self) -> int:
        return len(self._compilations)

    def __contains__(self, request: GenerationRequest) -> bool:
        return request in self._compilations

    def compile(self, request: GenerationRequest) -> Grammar | None:
        """The grammar of a request; None if it takes longer, and then `take` gives it. Raises InvalidArgumentError."""
        from .grammar import compile_grammar

        assert request.params.structured_outputs is not None, "the request has no grammar"
        asked = with_default(request.params.structured_outputs, is_compact=self._is_compact)
        is_cancelled = threading.Event()
        future = self._threads.submit(
            compile_grammar, asked, self._tokenizer, engine=self._engine, is_cancelled=is_cancelled
        )
        try:
            return future.result(PATIENCE_S)
        except TimeoutError:
            self._compilations[request] = _Compilation(future, is_cancelled)
            return None

    def take(self, *, is_idle: bool) -> list[tuple[GenerationRequest, Grammar | ServerError]]:
        """Requests whose grammar is there, or why it never will be. `is_idle`: wait a little for one."""
        if is_idle:
            wait([each.future for each in self._compilations.values()], IDLE_S, FIRST_COMPLETED)
        done = [(request, each.future) for request, each in self._compilations.items() if each.future.done()]
        taken: list[tuple[GenerationRequest, Grammar | ServerError]] = []
        for request, future in done:
            del self._compilations[request]
            error = future.exception()
            if error is None:
                taken.append((request, future.result()))
            elif isinstance(error, ServerError):
                taken.append((request, error))
            else:
                logger.error("compiling a grammar failed", exc_info=error)
                taken.append((request, InternalError(f"compiling the grammar failed: {type(error).__name__}: {error}")))
        return taken

    def discard(self, request: GenerationRequest) -> bool:
        """Forget a request; False if it is not here. What is being compiled for it alone ends soon: a library that is
        at it goes on beside, and its thread is free for others."""
        compilation = self._compilations.pop(request, None)
        if compilation is None:
            return False
        compilation.is_cancelled.set()
        compilation.future.cancel()
        return True

    def clear(self) -> None:
        for request in list(self._compilations):
            self.discard(request)

    def close(self) -> None:
        """End the threads, after the grammars that they are at."""
        self.clear()
        self._threads.shutdown()
