"""The stages of a server's stop: each gets a time limit, and a late one is left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

logger = logging.getLogger(__name__)

# Extra time for a stage after the deadline, to release its resources.
STAGE_GRACE_S = 5.0
# The time for stopping after a failed start: no requests have been accepted yet.
FAILED_START_STOP_S = 1.0


class StopStages:
    """The deadline that all stages share, and whether it was kept. Event loop thread only."""

    def __init__(self) -> None:
        # Set when a stage overran or was forced: threads or requests may be left.
        self.is_abandoned = False
        self._deadline_s: float | None = None

    def begin(self, timeout_s: float) -> None:
        """Begin stopping, which may take that long."""
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    def add(self, stack: AsyncExitStack, name: str, stop: Callable[[float], Awaitable[object]]) -> None:
        """Make `stop` a stage of stopping: it gets the seconds left and is cancelled a little after them."""

        async def stage() -> None:
            left_s = self._time_left_s()
            try:
                async with asyncio.timeout(left_s + STAGE_GRACE_S):
                    await stop(left_s)
            except asyncio.CancelledError:
                # Forced: the remaining stages close their resources without waiting.
                self._deadline_s = asyncio.get_running_loop().time()
                raise
            except TimeoutError:
                self.is_abandoned = True
                logger.error("stopping: %s took more than the remaining %.1f s; continuing", name, left_s)

        stack.push_async_callback(stage)

    def _time_left_s(self) -> float:
        if self._deadline_s is None:
            return FAILED_START_STOP_S
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())
