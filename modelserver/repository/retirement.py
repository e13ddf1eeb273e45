"""Retires versions: stop, drain (requests in flight are answered), close. Event loop thread; a pool closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from modelserver.core.interpreter import give_back
from modelserver.repository.plan import LoadedVersion

logger = logging.getLogger(__name__)

# How often a model that does not drain is logged.
_DRAIN_NOTICE_S = 60.0


class Retirement:
    """The versions of one model that take no more requests and are not closed yet.

    `force_close` is set when waiting for requests in flight must end; `on_closed` is called for each version. After
    `grace_s` (0: never) processes of a version that has not answered its requests are killed.
    """

    def __init__(
        self,
        name: str,
        *,
        close_pool: Executor,
        close: Callable[[LoadedVersion], None],
        force_close: asyncio.Event,
        on_closed: Callable[[int], None],
        grace_s: float = 0.0,
    ) -> None:
        self.versions: list[LoadedVersion] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._name = name
        self._close_pool = close_pool
        self._close = close
        self._force_close = force_close
        self._on_closed = on_closed
        self._grace_s = grace_s or math.inf

    def retire(self, loaded: LoadedVersion) -> None:
        """Let a version refuse requests from now on, finish those it has, and be closed."""
        loaded.model.stop()
        self.versions.append(loaded)
        task = asyncio.get_running_loop().create_task(self._finish(loaded), name=f"retiring {self._name}")
        self.tasks.add(task)
        task.add_done_callback(self._on_finished)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when the versions that are leaving now are closed, or time is up."""
        if tasks := tuple(self.tasks):
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close_all(self, versions: Iterable[LoadedVersion]) -> None:
        """Close versions that have no requests."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._close_pool, self._close, loaded) for loaded in versions))

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        """After the last release of a version its memory is free, and can be returned."""
        self.tasks.discard(task)
        with contextlib.suppress(RuntimeError):  # the pool is shut down because the server ends
            self._close_pool.submit(give_back)

    async def _finish(self, loaded: LoadedVersion) -> None:
        await self._drain(loaded)
        await self.close_all([loaded])
        self.versions.remove(loaded)
        logger.info("successfully unloaded '%s' version %d", self._name, loaded.version)
        self._on_closed(loaded.version)

    async def _drain(self, loaded: LoadedVersion) -> None:
        """Return when the model has answered all accepted requests, or when closing is forced."""
        model = loaded.model
        grace_s = self._grace_s  # the remaining part of it
        forced = asyncio.ensure_future(self._force_close.wait())
        try:
            while not forced.done():
                pause_s = min(_DRAIN_NOTICE_S, grace_s)
                drained = asyncio.ensure_future(model.drain(pause_s))
                await asyncio.wait((drained, forced), return_when=asyncio.FIRST_COMPLETED)
                if not drained.done():
                    drained.cancel()
                    return
                if drained.result():
                    return
                grace_s -= pause_s
                if grace_s <= 0:
                    grace_s = math.inf
                    self._end_grace(loaded)
                else:
                    logger.warning(
                        "model '%s' version %d was replaced or unloaded and still has %d requests in flight",
                        model.name,
                        model.version,
                        model.inflight,
                    )
        finally:
            forced.cancel()

    def _end_grace(self, loaded: LoadedVersion) -> None:
        """Kill the processes of a version that has not drained in time, or say why that is not possible."""
        model = loaded.model
        late = f"{model.inflight} requests were not answered within {self._grace_s:g} s (--unload-grace-secs)"
        if model.kill_processes(f"was unloaded or replaced and did not answer within {self._grace_s:g} s"):
            loaded.leaving = f"{late}: its processes are killed"
        else:
            loaded.leaving = (
                f"{late}: what executes them is part of the server's process and cannot be killed; it is closed once "
                "they are answered, or when the server is restarted"
            )
        logger.error(
            "model '%s' version %d was unloaded or replaced, and %s", model.name, model.version, loaded.leaving
        )
