"""The end of versions: stop, drain (what is in flight is answered), close. Event loop thread; a pool closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from modelserver.allocator import give_back
from modelserver.repository.plan import LoadedVersion

if TYPE_CHECKING:
    from modelserver.execution.model import Model

logger = logging.getLogger(__name__)

# How often a model that does not drain is mentioned.
_DRAIN_NOTICE_S = 60.0


class Retirement:
    """The versions of one model that take no more requests and are not closed yet.

    `force_close` is set when waiting for requests in flight must end; `on_closed` hears of each version.
    """

    def __init__(
        self,
        name: str,
        *,
        close_pool: Executor,
        close: Callable[[LoadedVersion], None],
        force_close: asyncio.Event,
        on_closed: Callable[[int], None],
    ) -> None:
        self.versions: list[LoadedVersion] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._name = name
        self._close_pool = close_pool
        self._close = close
        self._force_close = force_close
        self._on_closed = on_closed

    def retire(self, loaded: LoadedVersion) -> None:
        """Let a version refuse requests from now on, finish those it has, and be closed."""
        loaded.model.stop()
        self.versions.append(loaded)
        task = asyncio.get_running_loop().create_task(self._finish(loaded), name=f"retiring {self._name}")
        self.tasks.add(task)
        task.add_done_callback(self._on_finished)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when those that leave now are closed, or time is up."""
        if tasks := tuple(self.tasks):
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close_all(self, versions: Iterable[LoadedVersion]) -> None:
        """Close versions that have no requests."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._close_pool, self._close, loaded) for loaded in versions))

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        """Nobody holds the version any more: now its memory is free, and can go."""
        self.tasks.discard(task)
        with contextlib.suppress(RuntimeError):  # the pool takes nothing more, because the server ends
            self._close_pool.submit(give_back)

    async def _finish(self, loaded: LoadedVersion) -> None:
        await self._drain(loaded.model)
        await self.close_all([loaded])
        self.versions.remove(loaded)
        self._on_closed(loaded.version)

    async def _drain(self, model: Model) -> None:
        """Return when the model has answered all it accepted, or when closing is forced."""
        forced = asyncio.ensure_future(self._force_close.wait())
        try:
            while not forced.done():
                drained = asyncio.ensure_future(model.drain(_DRAIN_NOTICE_S))
                await asyncio.wait((drained, forced), return_when=asyncio.FIRST_COMPLETED)
                if not drained.done():
                    drained.cancel()
                elif drained.result():
                    return
                logger.warning(
                    "model '%s' version %d was replaced or unloaded and still has %d requests in flight",
                    model.name,
                    model.version,
                    model.inflight,
                )
        finally:
            forced.cancel()
