"""Calls of gRPC handlers without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from modelserver.frontends.grpc.call import Method, RpcError, StreamCall, UnaryCall
from modelserver.frontends.grpc.status import Status

MessageT = TypeVar("MessageT", bound=Message)


class RefusedError(Exception):
    """The call ended with a status other than OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{Status(status).name}: {message}")
        self.status = Status(status)
        self.message = message


async def call_unary(
    methods: Mapping[str, Method], path: str, request: Message | bytes, reply: type[MessageT], **details: Any
) -> MessageT:
    """Call the handler of a full path, or of one of GRPCInferenceService's methods. Raises RefusedError."""
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    message = request if isinstance(request, bytes) else request.SerializeToString()
    call = UnaryCall(
        message,
        lambda encoded: answer.set_result(bytes(encoded)),
        lambda status, text: answer.set_exception(RefusedError(status, text)),
        **details,
    )
    handler = methods[path if path.startswith("/") else f"/inference.GRPCInferenceService/{path}"].unary
    assert handler is not None, f"{path} is not unary"
    handler(call)
    return reply.FromString(await asyncio.wait_for(answer, 10))


class OpenStream:
    """A streaming call in progress; leave it by `finish`, `cancel` or by reading its end."""

    def __init__(self, method: Method, metadata: Mapping[str, str | bytes] | None = None) -> None:
        assert method.stream is not None, "the method does not stream"
        self._requests: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._replies: asyncio.Queue[bytes] = asyncio.Queue()
        self.num_read = 0
        # Cleared by a test to play a client that does not read.
        self.has_room = asyncio.Event()
        self.has_room.set()
        call = StreamCall(self._messages(), self._take, metadata or {})
        self.task = asyncio.ensure_future(method.stream(call))

    async def _messages(self) -> AsyncIterator[bytes]:
        while (message := await self._requests.get()) is not None:
            if isinstance(message, Exception):
                raise message
            self.num_read += 1
            yield message

    async def _take(self, message: Any) -> None:
        await self.has_room.wait()
        self._replies.put_nowait(bytes(message))

    def send(self, request: Message | bytes) -> None:
        self._requests.put_nowait(request if isinstance(request, bytes) else request.SerializeToString())

    def break_off(self, error: Exception) -> None:
        """As a wire that fails while it reads requests."""
        self._requests.put_nowait(error)

    def half_close(self) -> None:
        self._requests.put_nowait(None)

    async def receive(self, reply: type[MessageT]) -> MessageT:
        return reply.FromString(await asyncio.wait_for(self._replies.get(), 10))

    @property
    def num_unread(self) -> int:
        return self._replies.qsize()

    async def status(self) -> tuple[Status, str]:
        """How the call ended, once it has."""
        try:
            await asyncio.wait_for(self.task, 10)
        except RpcError as error:
            return Status(error.status), error.message
        return Status.OK, ""

    async def cancel(self) -> None:
        """As a client that cancels, or breaks the connection."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def turns(count: int = 20) -> None:
    """Let the loop run what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)
