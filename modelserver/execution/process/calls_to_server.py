"""The child's side of its calls to the server: inference by other models, and control of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from modelserver.backend import InferResponse, ServerError, UnsupportedError
from modelserver.core.request import InferRequest
from modelserver.errors import CancelledError
from modelserver.execution.process.messages import (
    Ask,
    Call,
    CallRead,
    CancelCall,
    ErrorRecord,
    Reply,
    ResponseRecord,
    Told,
)
from modelserver.execution.process.packing import Payload, request_record, response_of
from modelserver.execution.process.server_connection import ServerConnection, Waiting
from modelserver.execution.process.shared_buffer import ByteView

# The sender is told after every this many responses read; it waits when four times as many are unread.
_READ_AT_ONCE = 16

# The connection of this process; None in the server itself. Set once, before the first code of a model runs.
connection: ServerConnection | None = None


def server_connection() -> ServerConnection:
    """The connection of this child process. Raises RuntimeError in any other process.

    In a forked copy of it, such as a worker of multiprocessing, it raises UnsupportedError.
    """
    if connection is None:
        raise RuntimeError("the server can be asked from within its child processes only")
    if connection.is_disowned:
        raise UnsupportedError(
            "the server cannot be asked from a forked copy of the model's process (multiprocessing, os.fork): call "
            "other models in the model's own process, from threads for instance, and give the copies the answers"
        )
    return connection


class _Arrivals(Waiting):
    """The unread responses of a call. Separate from `Responses`, so that those may die."""

    def __init__(self) -> None:
        self.replies: deque[tuple[Reply, bytearray | ByteView]] = deque()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wake = asyncio.Event()

    def take(self, message: Reply | Told, payload: bytearray | ByteView) -> None:
        """Called by the connection."""
        assert isinstance(message, Reply), f"a call is answered by Reply, got {message!r}"
        self.replies.append((message, payload))
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
                self.loop.call_soon_threadsafe(self.wake.set)

    def pop(self) -> tuple[Reply, bytearray | ByteView] | None:
        return self.replies.popleft() if self.replies else None


class Responses:
    """The responses of one call, in order, for a thread, or for coroutines of one event loop.

    When `Responses` die or are cancelled, the server is told, and nothing is kept of the call.
    """

    def __init__(
        self, request: InferRequest, *, is_decoupled: bool, parents: tuple[int, int], is_async: bool = False
    ) -> None:
        """`parents`: the number of the first request that the call may be made for, and the number of such requests."""
        self.is_over = True
        self._is_cancelled = False
        self._connection = server_connection()
        self._arrivals = _Arrivals()
        self._is_async = is_async
        self._is_decoupled = is_decoupled
        self._num_read = 0
        if is_async:
            self._arrivals.loop = asyncio.get_running_loop()
        payload = Payload()
        record = request_record(request, payload)
        self._number = self._connection.expect(self._arrivals, is_async=is_async)
        self.is_over = False
        try:
            self._connection.send(
                Call(
                    number=self._number,
                    request=record,
                    is_decoupled=is_decoupled,
                    parent=parents[0],
                    num_parents=parents[1],
                ),
                payload,
            )
        except BaseException:
            self._end()
            raise

    def cancel(self) -> None:
        """Cancel the call: after the responses that have arrived, a CANCELLED error is the last one, as in Triton.

        Safe to repeat, from any thread.
        """
        if self.is_over or self._is_cancelled:
            return
        self._is_cancelled = True
        self._connection.forget(self._number, is_async=self._is_async)
        error = ErrorRecord.of(CancelledError("the model cancelled its request"))
        reply = Reply(number=self._number, response=ResponseRecord([], error, None), is_final=True)
        self._arrivals.take(reply, bytearray())
        self._connection.wake()
        self._connection.send(CancelCall(number=self._number))

    def next(self) -> InferResponse | ServerError | None:
        """The next response, waiting for it; None after the last."""
        while not self.is_over:
            if (response := self._response(*self._connection.wait(self._arrivals.pop))) is not None:
                return response
        return None

    async def next_async(self) -> InferResponse | ServerError | None:
        """As `next`, for a coroutine of the loop that it was made on."""
        arrivals = self._arrivals
        while not self.is_over:
            while (arrived := arrivals.pop()) is None:
                arrivals.wake.clear()
                if not arrivals.replies:
                    await arrivals.wake.wait()
            if (response := self._response(*arrived)) is not None:
                return response
        return None

    def _response(self, message: Reply, payload: bytearray | ByteView) -> InferResponse | ServerError | None:
        """The response; None for a final flag without a response, unless the called model is decoupled."""
        if message.is_final:
            self._end()
        elif self._is_decoupled and not self._is_cancelled:
            self._tell_read()
        if message.response is None:
            return InferResponse() if self._is_decoupled else None
        response = response_of(message.response, payload)
        if isinstance(response, InferResponse):
            response.is_final = message.is_final
        return response

    def _tell_read(self) -> None:
        """Tell the other model that there is room for more; not each time, because that costs a message."""
        self._num_read += 1
        if self._num_read == _READ_AT_ONCE:
            self._num_read = 0
            self._connection.send(CallRead(number=self._number, count=_READ_AT_ONCE))

    def _end(self) -> None:
        self.is_over = True
        self._connection.forget(self._number, is_async=self._is_async)

    def __del__(self) -> None:
        if not self.is_over and not self._is_cancelled:
            self.is_over = True
            self._connection.abandon(self._number, is_async=self._is_async)
            self._connection.post(CancelCall(number=self._number))


class _Question(Waiting):
    def __init__(self) -> None:
        self.answer: Told | None = None

    def take(self, message: Reply | Told, _payload: bytearray | ByteView) -> None:
        assert isinstance(message, Told), f"a question is answered by Told, got {message!r}"
        self.answer = message


def ask(topic: str, **arguments: Any) -> Any:
    """The server's answer; blocks. Raises the ServerError that it answers."""
    connection = server_connection()
    question = _Question()
    number = connection.expect(question)
    try:
        connection.send(Ask(number=number, topic=topic, arguments=arguments))
        answer = connection.wait(lambda: question.answer)
    finally:
        connection.forget(number)
    if answer.error is not None:
        raise answer.error.error()
    return answer.value


def tell(topic: str, **arguments: Any) -> None:
    """As `ask`, without an answer."""
    server_connection().send(Ask(topic=topic, arguments=arguments))


def tell_soon(topic: str, **arguments: Any) -> None:
    """As `tell`, from a destructor."""
    if connection is not None:
        connection.post(Ask(topic=topic, arguments=arguments))
