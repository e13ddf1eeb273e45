"""Runs what methods of a model return that may be coroutines."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Coroutine
from typing import Any

from modelserver.backend.child import LoopThread


class CoroutineRunner:
    """One event loop for all coroutines of a model, in a thread of its own, begun with the first of them.

    It goes on between the calls of the model's methods, so that tasks which `execute` leaves behind are executed.
    """

    def __init__(self) -> None:
        self._thread: LoopThread | None = None

    def complete(self, result: Any) -> Any:
        """`result`; of a coroutine, what it returns or raises. Blocks until then."""
        if not inspect.isawaitable(result):
            return result
        outcome = asyncio.run_coroutine_threadsafe(_outcome(result), self._loop()).result()
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine, which must not raise, without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop())

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._thread is None:
            self._thread = LoopThread("coroutines", on_exit=traceback.print_exc)
        return self._thread.loop


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _outcome(result: Awaitable[Any]) -> Any:
    """What it returns or raises; what ends a program would end the loop."""
    try:
        return await result
    except BaseException as error:
        return _Raised(error)
