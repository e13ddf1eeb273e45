"""A request body on its way from the event loop to a thread, piece by piece: never the whole of it in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from modelserver.errors import CancelledError, InternalError, ServerError

# Bytes that wait for the thread before the client is read no further.
_MAX_WAITING_BYTES = 1 << 20


class BodyPipe:
    """A wire puts the pieces in while there is room, a thread takes them out, and the handler says that all is well.

    `num_bytes` is the announced length, if there is one. `error` ends the pipe: the wire answers with it. `on_change`
    is called when there is room again, or an error. Everything is called on the event loop thread, except `pieces`.
    """

    def __init__(self, num_bytes: int | None) -> None:
        self.num_bytes = num_bytes
        self.error: ServerError | None = None
        self.on_change: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_waiting = 0
        self._is_ended = self._is_dropped = False
        self._done: asyncio.Future[Any] = self._loop.create_future()

    def start(self, executor: Executor, work: Callable[[BodyPipe], Any]) -> asyncio.Future[Any]:
        """Run `work` in a thread, with this pipe."""
        self._done = self._loop.run_in_executor(executor, work, self)
        self._done.add_done_callback(self._end)
        return self._done

    def fail(self, error: ServerError) -> None:
        """Take no more."""
        self.error = error
        self._change()

    @property
    def has_room(self) -> bool:
        """Whether the client should send more now."""
        return self._num_waiting < _MAX_WAITING_BYTES or self.error is not None

    def put(self, piece: bytes) -> None:
        """The next piece; it is dropped after an error."""
        if piece and not self._is_ended and self.error is None:
            self._num_waiting += len(piece)
            self._queue.put(piece)

    async def finish(self) -> Any:
        """The body is complete, and its request is allowed: the thread may keep it. Returns and raises as `work`."""
        self._put_end()
        return await asyncio.shield(self._done)

    def drop(self) -> None:
        """The body will not be complete, or its reader has gone. Nothing happens after `finish`."""
        if not self._is_ended:
            self._is_dropped = True
            self._put_end()

    def _put_end(self) -> None:
        self.on_change = None
        if not self._is_ended:
            self._is_ended = True
            self._queue.put(None)

    def pieces(self) -> Iterator[bytes]:
        """The pieces, for the thread. Raises CancelledError when the body was dropped."""
        num_taken = 0
        while (piece := self._queue.get()) is not None:
            if self._is_dropped:
                break
            yield piece
            num_taken += len(piece)
            if num_taken >= _MAX_WAITING_BYTES // 4 or self._queue.empty():
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._took, num_taken)
                num_taken = 0
        if self._is_dropped:
            raise CancelledError("the client has left before the end of its request")

    def _took(self, num_bytes: int) -> None:
        had_room = self.has_room
        self._num_waiting -= num_bytes
        if not had_room and self.has_room:
            self._change()

    def _end(self, done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None and not self._is_ended:
            self.fail(error if isinstance(error, ServerError) else InternalError(f"{type(error).__name__}: {error}"))

    def _change(self) -> None:
        on_change = self.on_change
        if on_change is not None:
            on_change()


class PipedBody(bytes):
    """Stands for a body that went through `pipe`; empty. Without a handler that finishes it, the pipe is dropped."""

    pipe: BodyPipe

    @classmethod
    def of(cls, pipe: BodyPipe) -> PipedBody:
        body = cls()
        body.pipe = pipe
        return body

    def __del__(self) -> None:
        self.pipe.drop()
