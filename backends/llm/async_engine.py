"""The engine on a thread of its own, for asyncio: `async for output in AsyncLLM(directory).generate(prompt,
params)`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from modelserver.backend import InternalError, ServerError, UnavailableError

from .checkpoint import open_checkpoint
from .engine import Engine
from .generation import GenerationRequest, SequenceOutput
from .llm import Prompt, RequestOutput, make_request
from .options import EngineOptions
from .sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Inbox:
    """Receives the outputs of one request, on the loop of its caller."""

    request: GenerationRequest
    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[SequenceOutput | ServerError] = field(default_factory=asyncio.Queue)
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class _Add:
    inbox: _Inbox


@dataclass(frozen=True, slots=True)
class _Abort:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class _Close:
    pass


class AsyncLLM:
    """`generate` and `stream` may be called from any event loop, `close` from any thread but the engine's.

    The thread sleeps while there is no work. `close` ends it, and fails running requests.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Loads the model, which takes its time; `options` are EngineOptions. Raises ServerErrors."""
        chosen = EngineOptions.from_parameters(options)
        with open_checkpoint(Path(model)) as checkpoint:
            engine = Engine.from_checkpoint(checkpoint, chosen)
        self._start(engine)

    @classmethod
    def over(cls, engine: Engine) -> Self:
        """The same over an engine that is there already; from now on only this may call it."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self.is_closed = False
        # Unbounded: who asks holds a coroutine for each request, and limits those.
        self._commands: queue.SimpleQueue[_Add | _Abort | _Close] = queue.SimpleQueue()
        self._inboxes: dict[GenerationRequest, _Inbox] = {}
        self._thread = threading.Thread(target=self._work, name="llm-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """The request so far, each time that it has grown; the last has `finished`. Leaving the loop aborts it.

        Raises InvalidArgumentError for what cannot work, UnavailableError when the engine is closed.
        """
        params = sampling_params or SamplingParams()
        request = await asyncio.to_thread(make_request, prompt, params, self.engine.tokenizer)
        request.request_id = request_id
        request.priority = priority
        so_far = RequestOutput.of(request)
        # Closed with this one, and not when the collector finds it: leaving has to abort at once.
        async with aclosing(self.stream(request)) as outputs:
            async for output in outputs:
                so_far.take(output)
                yield so_far.copy()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SequenceOutput]:
        """The news of each choice, as it arrives. Leaving the loop aborts the request."""
        if self.is_closed:
            raise UnavailableError("the engine is closed")
        inbox = _Inbox(request, asyncio.get_running_loop(), num_running=request.params.n)
        self._commands.put(_Add(inbox))
        try:
            # Closed from another thread meanwhile: the command may have come behind the one that ended the thread.
            if self.is_closed:
                raise UnavailableError("the engine is closed")
            while inbox.num_running:
                arrived = await inbox.arrived.get()
                error = arrived if isinstance(arrived, ServerError) else arrived.error
                if error is not None:
                    inbox.num_running = 0
                    raise error
                assert isinstance(arrived, SequenceOutput), f"{arrived} arrived"
                if arrived.finish_reason is not None:
                    inbox.num_running -= 1
                yield arrived
        finally:
            if inbox.num_running:
                self._commands.put(_Abort(request))

    def close(self) -> None:
        """End the thread after the step that runs; requests that have not ended fail with UnavailableError."""
        if not self.is_closed:
            self.is_closed = True
            self._commands.put(_Close())
            self._thread.join()
            self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _work(self) -> None:
        """The engine's thread."""
        is_open = True
        while is_open:
            is_open = self._obey()
            try:
                self._deliver(self.engine.step())
            except Exception as error:
                logger.exception("a step of the engine failed; %d requests fail with it", len(self._inboxes))
                self.engine.reset()
                self._fail_all(InternalError(f"the engine failed: {type(error).__name__}: {error}"))
        self._fail_all(UnavailableError("the engine was closed before the request was finished"))

    def _obey(self) -> bool:
        """All commands that are there; without work the next one is waited for. False: end."""
        is_waiting = not self.engine.has_work or (self.engine.runner.is_lost and not self._inboxes)
        while True:
            try:
                command = self._commands.get(block=is_waiting)
            except queue.Empty:
                return True
            is_waiting = False
            if isinstance(command, _Close):
                self.engine.reset()
                return False
            if isinstance(command, _Abort):
                self.engine.abort(command.request)
                self._inboxes.pop(command.request, None)
                continue
            inbox = command.inbox
            try:
                self.engine.add(inbox.request)
            except ServerError as error:
                self._send({inbox.loop: [(inbox, error)]})
            else:
                self._inboxes[inbox.request] = inbox

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        """One call per loop and step, however many outputs there are."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, SequenceOutput | ServerError]]] = {}
        for output in outputs:
            inbox = self._inboxes[output.request]
            by_loop.setdefault(inbox.loop, []).append((inbox, output))
        self._send(by_loop)
        for output in outputs:
            is_end = output.finish_reason is not None or output.error is not None
            if is_end and not self.engine.is_running(output.request):
                self._inboxes.pop(output.request, None)

    def _fail_all(self, error: ServerError) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, SequenceOutput | ServerError]]] = {}
        for inbox in self._inboxes.values():
            by_loop.setdefault(inbox.loop, []).append((inbox, error))
        self._inboxes.clear()
        self._send(by_loop)

    def _send(
        self, by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, SequenceOutput | ServerError]]]
    ) -> None:
        for loop, arrivals in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, arrivals)
            except RuntimeError:  # the loop is closed: its requests do not wait any more
                for inbox, _ in arrivals:
                    self.engine.abort(inbox.request)
                    self._inboxes.pop(inbox.request, None)


def _put_all(arrivals: list[tuple[_Inbox, SequenceOutput | ServerError]]) -> None:
    for inbox, arrived in arrivals:
        inbox.arrived.put_nowait(arrived)
