"""Work that would block the event loop for long: done in slices, beside the loop, one slice at a time.

Most of this work holds the interpreter's lock. A thread that computes without a pause gives the lock to the loop only
every 5 ms, and several such threads take turns. So all long work of a loop shares one thread, which changes between the
pieces of work about every millisecond and pauses briefly so that the loop can run. A slice should not take longer than
that.

Work that computes without the interpreter's lock, such as compression, has threads of its own, at most half as many at
a time as there are processors: otherwise the loop would wait for a processor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
# Yields after each slice, and returns the result.
Slices = Generator[None, None, T]
# Returns the result of finished work, or raises its error.
Result = Callable[[], T]

# A piece of work gets as many slices as begin within this time.
_TURN_S: Final = 0.001
# Long enough for a thread that waits for the interpreter's lock to get it.
_PAUSE_S: Final = 0.0001

_work_of: WeakKeyDictionary[asyncio.AbstractEventLoop, LongWork] = WeakKeyDictionary()


def finish(slices: Slices[T]) -> T:
    """Do all of the work here and now."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def at_once(function: Callable[[], T]) -> Slices[T]:
    """All of the work as one slice."""
    yield
    return function()


def long_work() -> LongWork:
    """The long work of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _work_of.get(loop)
    if found is None:
        found = _work_of[loop] = LongWork()
    return found


def num_computing_threads() -> int:
    """How many threads may compute beside an event loop: half as many as there are processors, and at least one."""
    return max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else 1


class _Job:
    __slots__ = ("context", "error", "is_given_up", "result", "slices", "then")

    def __init__(self, slices: Slices[Any], then: Callable[[Result[Any]], None], context: Context) -> None:
        self.slices = slices
        self.then = then
        self.context = context
        self.is_given_up = False
        self.result: Any = None
        self.error: BaseException | None = None

    def get(self) -> Any:
        error, self.error = self.error, None
        result, self.result = self.result, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a cycle that would keep the work's data in memory
        return result


class LongWork:
    """The pieces of work of one event loop. Called from its thread."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._is_running = False
        self._last_s: float | None = None
        # Work without the interpreter's lock that waits for a thread.
        self._computations: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._num_computing = 0

    def has_rested(self, seconds: float) -> bool:
        """Whether there was work, and none for that long: True once. Then memory of the work can be given back."""
        if self._last_s is None or self._jobs or time.monotonic() - self._last_s < seconds:
            return False
        self._last_s = None
        return True

    def start(self, slices: Slices[T], then: Callable[[Result[T]], None]) -> Callable[[], None]:
        """Do the work, then call `then` on the event loop, with the current context variables.

        Returns a function that cancels the work: it ends after its current slice, and `then` is not called.
        """
        job = _Job(slices, then, copy_context())
        self._jobs.append(job)
        self._last_s = time.monotonic()
        self._ensure_running()

        def give_up() -> None:
            job.is_given_up = True

        return give_up

    async def run(self, slices: Slices[T]) -> T:
        """Do the work and wait for its result. When the caller is cancelled, so is the work."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def take(result: Result[T]) -> None:
            if future.done():
                return
            try:
                future.set_result(result())
            except Exception as error:
                future.set_exception(error)

        give_up = self.start(slices, take)
        try:
            return await future
        except asyncio.CancelledError:
            give_up()
            raise

    def compute(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call a function that computes without the interpreter's lock, in another thread, when there is one for it."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._computations.append((function, future))
        self._compute_next()
        return future

    def _compute_next(self) -> None:
        loop = asyncio.get_running_loop()
        while self._computations and self._num_computing < num_computing_threads():
            function, future = self._computations.popleft()
            if not future.done():
                self._num_computing += 1
                loop.run_in_executor(None, function).add_done_callback(partial(self._end_computation, future))

    def _end_computation(self, future: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._num_computing -= 1
        self._last_s = time.monotonic()
        if future.done() or done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._compute_next()

    def _ensure_running(self) -> None:
        if self._jobs and not self._is_running:
            self._is_running = True
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, self._work, loop).add_done_callback(self._rest)

    def _rest(self, _: asyncio.Future[None]) -> None:
        self._is_running = False
        self._last_s = time.monotonic()
        self._ensure_running()  # a piece may have been added while the thread ended

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give each piece of work a slice, in turns, until none is left. In the thread."""
        while self._jobs:
            job = self._jobs.popleft()
            if job.is_given_up:
                job.slices.close()
                continue
            try:
                end_s = time.perf_counter() + _TURN_S
                while time.perf_counter() < end_s:
                    next(job.slices)
            except StopIteration as end:
                job.result = end.value
            except BaseException as error:
                job.error = error
            else:
                self._jobs.append(job)
                time.sleep(_PAUSE_S)
                continue
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_end, job, context=job.context)
            time.sleep(_PAUSE_S)


def _end(job: _Job) -> None:
    if not job.is_given_up:
        job.then(job.get)
