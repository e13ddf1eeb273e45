"""The threads of a repository: they read, load, close, and look at the disk, so that the event loop never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_NUM_CLOSE_THREADS = 4


class RepositoryPools:
    """`load` may take minutes, `close` must not wait for it, and `scan` looks at one thing after the other."""

    def __init__(self, num_load_threads: int) -> None:
        self.load = ThreadPoolExecutor(num_load_threads, thread_name_prefix="model-load")
        self.close = ThreadPoolExecutor(_NUM_CLOSE_THREADS, thread_name_prefix="model-close")
        self.scan = ThreadPoolExecutor(1, thread_name_prefix="repository-scan")

    async def in_scan(self, function: Callable[..., Result], *args: object) -> Result:
        """Run a function that reads the disk. Event loop thread."""
        return await asyncio.get_running_loop().run_in_executor(self.scan, function, *args)

    def shutdown(self, *, waits: bool) -> None:
        """Accept no more work; with `waits`, return when all accepted work is done."""
        for pool in (self.load, self.close, self.scan):
            pool.shutdown(wait=waits)
