"""Requests that wait for their model to be loaded: each for as long as its deadline allows, and bounded in number."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import (
    SHUTTING_DOWN,
    CancelledError,
    InternalError,
    LoadOnDemandError,
    QueueFullError,
    QueueTimeoutError,
    ServerError,
    UnavailableError,
)

_logger = logging.getLogger(__name__)

# A model that is unloaded before a waiting request could be submitted is loaded again, at most this many times.
_MAX_ATTEMPTS = 5


class WaitingRequests:
    """Made by the data plane; its `infer` gets each request again when the model serves. Event loop thread only."""

    def __init__(self, infer: Callable[[InFlightRequest], ResponseStream], *, max_waiting: int = 10_000) -> None:
        self._infer = infer
        self._max_waiting = max_waiting
        self._tasks: dict[InFlightRequest, asyncio.Task[ServerError | None]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._tasks)

    def wait(self, request: InFlightRequest, unloaded: LoadOnDemandError) -> ResponseStream:
        """Load the model, then have the request answered on its stream.

        Raises QueueFullError, and `unloaded` for a request that already waits: `_submit` then loads the model again.
        """
        if request in self._tasks:
            raise unloaded
        if len(self._tasks) >= self._max_waiting:
            error = QueueFullError(f"{self._max_waiting} requests wait for models to be loaded; try again later")
            error.retry_after_s = 1.0
            raise error
        task = asyncio.get_running_loop().create_task(
            self._submit(request, unloaded), name="request for an unloaded model"
        )
        self._tasks[request] = task
        # Not at the end of the Task: a Task that is cancelled at once never begins.
        task.add_done_callback(lambda done: self._settle(request, done))
        request.on_cancel = self._cancel
        return request.stream

    def close(self) -> None:
        """The server stops: give up all waits."""
        for task in self._tasks.values():
            task.cancel()

    def _cancel(self, request: InFlightRequest) -> None:
        self._tasks[request].cancel()

    def _settle(self, request: InFlightRequest, task: asyncio.Task[ServerError | None]) -> None:
        """The wait is over: answer, unless the request was handed on and is answered there."""
        del self._tasks[request]
        error: ServerError | None
        if task.cancelled():
            error = UnavailableError(f"{SHUTTING_DOWN} and accepts no new requests")
            if request.is_cancelled:
                error = CancelledError(f"request to model '{request.model_name}' was cancelled")
        elif (fault := task.exception()) is not None:
            _logger.error("a request that waited for its model failed", exc_info=fault)
            error = InternalError(f"internal error: {type(fault).__name__}; the server's log has the details")
        else:
            error = task.result()
        if error is not None:
            request.on_cancel = None  # a client that leaves on its answer must leave no reference behind
            request.stream.deliver(InferResponse(error=error))

    async def _submit(self, request: InFlightRequest, unloaded: LoadOnDemandError) -> ServerError | None:
        """Why the request was not accepted in the end; None: it was accepted, and the model answers it."""
        for _ in range(_MAX_ATTEMPTS):
            deadline_ns = request.deadline_ns
            left_s = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            try:
                async with asyncio.timeout(left_s):
                    await unloaded.load()
            except TimeoutError:
                return QueueTimeoutError(
                    f"Request timeout expired while model '{request.model_name}' was loaded on demand"
                )
            except ServerError as error:
                return error
            request.on_cancel = None
            try:
                self._infer(request)
            except LoadOnDemandError as again:
                unloaded = again
                request.on_cancel = self._cancel
            except ServerError as error:
                return error
            else:
                return None
        return UnavailableError(f"model '{request.model_name}' was loaded {_MAX_ATTEMPTS} times and unloaded each time")
