"""The edge of a call: messages in, errors out.

Every handler's exceptions end here; those that are not `ServerError`s are logged, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from math import ceil
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from modelserver.core.tensor import Buffer
from modelserver.errors import InternalError, InvalidArgumentError, LoadOnDemandError, ServerError
from modelserver.protocol.call import Method, RpcError, StreamCall, UnaryCall
from modelserver.protocol.grpc_status import Status, status_of


class Tasks:
    """Keeps the tasks that it started until they are done. Used on the event loop thread."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


_logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)


def parse(message_class: type[RequestT], message: Buffer) -> RequestT:
    """The parsed request. Raises InvalidArgumentError naming the expected message."""
    try:
        return message_class.FromString(message)  # type: ignore[arg-type]  # it takes any buffer
    except DecodeError:
        name = message_class.DESCRIPTOR.full_name
        raise InvalidArgumentError(f"the message is not a serialized {name}") from None


def as_server_error(error: Exception) -> ServerError:
    """`error` itself if it is meant for callers; others are logged, and callers learn only their type."""
    if isinstance(error, ServerError):
        return error
    _logger.error("unexpected error while answering a gRPC call", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}; the server's log has the details")


def fail(call: UnaryCall, error: Exception) -> None:
    """End the call with the status of the error.

    A caller whose deadline has passed gets DEADLINE_EXCEEDED and not UNAVAILABLE, which means "try again": our answer
    may arrive before its own clock expires.
    """
    told = as_server_error(error)
    status, message = status_of(told)
    is_late = call.deadline_ns is not None and time.monotonic_ns() >= call.deadline_ns
    if is_late and status == Status.UNAVAILABLE:
        # The first words are those that gRPC's clients use when their own clock expires.
        call.fail(Status.DEADLINE_EXCEEDED, f"Deadline Exceeded: {message}")
    elif told.retry_after_s is None:
        call.fail(status, message)
    else:
        call.fail(status, message, max(1, ceil(told.retry_after_s * 1000)))


def answered(request_class: type[RequestT], answer: Callable[[RequestT], Message]) -> Method:
    """A unary method that is answered at once, or once its model is loaded on demand."""
    waiting = Tasks()

    def handle(call: UnaryCall) -> None:
        try:
            reply = answer(parse(request_class, call.message)).SerializeToString()
        except LoadOnDemandError as unloaded:
            waiting.start(_answer_loaded(call, unloaded, handle))
        except Exception as error:
            fail(call, error)
        else:
            call.reply((reply,))

    return Method(unary=handle)


async def _answer_loaded(call: UnaryCall, unloaded: LoadOnDemandError, handle: Callable[[UnaryCall], None]) -> None:
    try:
        await unloaded.load()
    except Exception as error:
        fail(call, error)
    else:
        handle(call)


def awaited(request_class: type[RequestT], answer: Callable[[RequestT], Awaitable[Message]], tasks: Tasks) -> Method:
    """A unary method whose answer takes time. It runs to its end even when the client leaves."""

    async def run(call: UnaryCall) -> None:
        try:
            reply = await answer(parse(request_class, call.message))
        except Exception as error:
            fail(call, error)
        else:
            call.reply((reply.SerializeToString(),))

    return Method(unary=lambda call: tasks.start(run(call)))


def streamed(serve: Callable[[StreamCall], Awaitable[None]]) -> Method:
    """A streaming method; its errors become the status of the call."""

    async def handle(call: StreamCall) -> None:
        try:
            await serve(call)
        except RpcError:
            raise
        except Exception as error:
            raise RpcError(*status_of(as_server_error(error))) from None

    return Method(stream=handle)
