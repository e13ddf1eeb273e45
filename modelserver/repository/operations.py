"""The operations of one model: one at a time, few waiting, and a newer operation replaces an older one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from modelserver.errors import SHUTTING_DOWN, InternalError, ServerError, UnavailableError
from modelserver.repository.load_request import LoadRequest

logger = logging.getLogger(__name__)


class SupersededError(UnavailableError):
    """A newer request replaced this operation before it was done. The model has not failed."""


@dataclass(frozen=True, slots=True)
class UnloadRequest:
    """An unload of one version, or with None of the whole model."""

    version: int | None = None


OperationRequest = LoadRequest | UnloadRequest


@dataclass(slots=True, eq=False)
class _Operation:
    """An operation, and the future on which its callers wait."""

    request: OperationRequest
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        # If the caller has gone, its exception must not be reported as unread.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def is_same_as(self, request: OperationRequest) -> bool:
        if isinstance(self.request, LoadRequest) and isinstance(request, LoadRequest):
            return self.request.is_plain and self.request == request
        return self.request == request

    def is_undone_by(self, request: OperationRequest) -> bool:
        """Whether `request` undoes this operation: it concerns the same version, or all versions."""
        return request.version is None or request.version == self.request.version

    def settle(self, error: ServerError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class OperationQueue:
    """Runs `perform(request)` for each operation; used on the event loop thread only.

    An operation continues when its caller goes away: others may wait for it, and its changes are half done. At
    most one operation waits per version, and one for the whole model.
    """

    def __init__(self, name: str, perform: Callable[[OperationRequest], Awaitable[None]]) -> None:
        self._name = name
        self._perform = perform
        self._waiting: list[_Operation] = []
        self._running: _Operation | None = None
        self._runner: asyncio.Task[None] | None = None

    @property
    def pending_load(self) -> asyncio.Future[None] | None:
        """The result of the newest load, if no other operation is waiting."""
        operations = [*([self._running] if self._running is not None else []), *self._waiting]
        if operations and isinstance(operations[-1].request, LoadRequest):
            return operations[-1].done
        return None

    @property
    def runner(self) -> asyncio.Task[None] | None:
        """The task that performs the operations; None without operations."""
        return self._runner

    def is_unload_waiting(self, version: int | None = None) -> bool:
        """Whether a waiting operation will undo the running one, for one version or all. Called from any thread."""
        return any(
            isinstance(waiting.request, UnloadRequest) and waiting.request.version in (None, version)
            for waiting in self._waiting
        )

    def submit(self, request: OperationRequest) -> asyncio.Future[None]:
        """Enqueue an operation; the future gets its result, or its ServerError.

        If the last waiting operation does the same, the call joins it. Operations that this one undoes are superseded.
        """
        if not self._waiting or not self._waiting[-1].is_same_as(request):
            what = "the model" if request.version is None else f"version {request.version} of the model"
            verb = "unload" if isinstance(request, UnloadRequest) else "load"
            undone = [waiting for waiting in self._waiting if waiting.is_undone_by(request)]
            self._waiting = [waiting for waiting in self._waiting if waiting not in undone]
            self._refuse(undone, f"superseded by a newer {verb} of {what}")
            self._waiting.append(_Operation(request))
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name=f"operations of {self._name}")
        return self._waiting[-1].done

    def supersede(self, reason: str) -> None:
        """Make the waiting operations fail."""
        waiting, self._waiting = self._waiting, []
        self._refuse(waiting, reason)

    def _refuse(self, operations: list[_Operation], reason: str) -> None:
        for operation in operations:
            operation.settle(SupersededError(f"model '{self._name}': {reason}"))

    async def _run(self) -> None:
        try:
            while self._waiting:
                self._running = self._waiting.pop(0)
                await self._carry_out(self._running)
                self._running = None
        finally:
            self._running = self._runner = None

    async def _carry_out(self, operation: _Operation) -> None:
        try:
            await self._perform(operation.request)
        except ServerError as error:
            operation.settle(error)
        except Exception as error:
            logger.exception("model '%s': an operation failed", self._name)
            operation.settle(InternalError(f"model '{self._name}': {type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            operation.settle(UnavailableError(SHUTTING_DOWN))
            raise
        else:
            operation.settle(None)


async def all_of(operations: Iterable[Awaitable[None]]) -> None:
    """Wait for all; then raise the error of the first that failed."""
    for result in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


# The threads of a repository: they read, load, close, and look at the disk, so that the event loop never waits.
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
