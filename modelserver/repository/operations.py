"""The operations of one model: one at a time, at most one waiting, and a newer one takes its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from modelserver.errors import InternalError, ServerError, UnavailableError
from modelserver.repository.loader import LoadRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Operation:
    """A load, or with `request` None an unload, and where its callers wait."""

    request: LoadRequest | None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        # A caller that has left must not leave an unread exception behind.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def is_same_as(self, request: LoadRequest | None) -> bool:
        if self.request is None or request is None:
            return self.request is request
        return self.request.is_plain and request.is_plain

    def settle(self, error: ServerError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class OperationQueue:
    """Runs `perform(request)` for each operation; used on the event loop thread only.

    A caller that goes away does not stop an operation: others may wait for it, and files are half changed.
    """

    def __init__(self, name: str, perform: Callable[[LoadRequest | None], Awaitable[None]]) -> None:
        self._name = name
        self._perform = perform
        self._waiting: _Operation | None = None
        self._runner: asyncio.Task[None] | None = None

    @property
    def runner(self) -> asyncio.Task[None] | None:
        """The task that works off the operations; None when there are none."""
        return self._runner

    @property
    def is_unload_waiting(self) -> bool:
        """Whether what runs now will be undone right after."""
        return self._waiting is not None and self._waiting.request is None

    def submit(self, request: LoadRequest | None) -> asyncio.Future[None]:
        """Enqueue a load, or with None an unload; the future has its end, or the ServerError that it met.

        An operation that waits already and would do the same is joined, any other is superseded.
        """
        if self._waiting is None or not self._waiting.is_same_as(request):
            self.supersede(f"superseded by a newer {'unload' if request is None else 'load'} of the model")
            self._waiting = _Operation(request)
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name=f"operations of {self._name}")
        return self._waiting.done

    def supersede(self, reason: str) -> None:
        """Let the operation that waits fail, if there is one."""
        operation, self._waiting = self._waiting, None
        if operation is not None:
            operation.settle(UnavailableError(f"model '{self._name}': {reason}"))

    async def _run(self) -> None:
        try:
            while (operation := self._waiting) is not None:
                self._waiting = None
                await self._carry_out(operation)
        finally:
            self._runner = None

    async def _carry_out(self, operation: _Operation) -> None:
        try:
            await self._perform(operation.request)
        except ServerError as error:
            operation.settle(error)
        except Exception as error:
            logger.exception("model '%s': an operation failed", self._name)
            operation.settle(InternalError(f"model '{self._name}': {type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            operation.settle(UnavailableError("the server is shutting down"))
            raise
        else:
            operation.settle(None)
