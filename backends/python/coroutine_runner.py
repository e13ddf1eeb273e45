"""Runs what methods of a model return that may be coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any


class CoroutineRunner:
    """Runs coroutines to their end, one after the other, all on one event loop, which what they make may belong to."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def complete(self, result: Any) -> Any:
        """`result`; of a coroutine, what it returns or raises."""
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(result))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
