"""The stages of a server's stop: each is told how long it may take, and what is late is gone past."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

logger = logging.getLogger(__name__)

# What a stage of stopping gets beyond the deadline, to let go of what it holds.
STAGE_GRACE_S = 5.0
# What stopping after a start that failed may take: nothing was promised to anyone yet.
FAILED_START_STOP_S = 1.0


class StopStages:
    """The deadline that all stages share, and whether it was kept. Event loop thread only."""

    def __init__(self) -> None:
        # Set when a stage overran or was forced: threads or requests may be left.
        self.is_abandoned = False
        self._deadline_s: float | None = None

    def begin(self, timeout_s: float) -> None:
        """Stopping begins, and may take that long."""
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    def add(self, stack: AsyncExitStack, name: str, stop: Callable[[float], Awaitable[object]]) -> None:
        """Make `stop` a stage of stopping: it is told the seconds left and cut off a little after them."""

        async def stage() -> None:
            left_s = self._time_left_s()
            try:
                async with asyncio.timeout(left_s + STAGE_GRACE_S):
                    await stop(left_s)
            except asyncio.CancelledError:
                # Forced: the stages that follow close what they hold, and wait for nobody.
                self._deadline_s = asyncio.get_running_loop().time()
                raise
            except TimeoutError:
                self.is_abandoned = True
                logger.error("stopping: %s took more than the %.1f s that were left; going on", name, left_s)

        stack.push_async_callback(stage)

    def _time_left_s(self) -> float:
        if self._deadline_s is None:
            return FAILED_START_STOP_S
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())
