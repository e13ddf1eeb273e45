"""Calls of gRPC handlers without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from modelserver.core.long_work import finish
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Buffer
from modelserver.frontends.grpc.codec import LongRequest, Outline, decode_on_loop, element_slices, outline_slices
from modelserver.protocol.call import Method, Parts, RpcError, StreamCall, UnaryCall
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.limits import DEFAULT_GRPC_LIMITS, GrpcLimits

MessageT = TypeVar("MessageT", bound=Message)


def decode_infer_request(message: Buffer, limits: GrpcLimits = DEFAULT_GRPC_LIMITS) -> InFlightRequest:
    """The request in a serialized ModelInferRequest, decoded at once however long it is."""
    decoded = decode_on_loop(message, limits)
    if isinstance(decoded, LongRequest):
        decoded = finish(outline_slices(decoded, limits))
    return finish(element_slices(decoded)) if isinstance(decoded, Outline) else decoded


class RefusedError(Exception):
    """The call ended with a status other than OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{Status(status).name}: {message}")
        self.status = Status(status)
        self.message = message


class Call(UnaryCall):
    """A unary call that keeps how it ended: `parts` of the reply, or status and text in `failure`."""

    def __init__(
        self, message: Buffer, metadata: Mapping[str, str | bytes] | None = None, deadline_ns: int | None = None
    ) -> None:
        self.message = message
        self.metadata = metadata or {}
        self.deadline_ns = deadline_ns
        self.on_cancel = None
        self.parts: Parts | None = None
        self.failure: tuple[int, str] | None = None
        self._ended = asyncio.Event()

    def reply(self, parts: Parts) -> None:
        self._end()
        self.parts = parts

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        self._end()
        self.failure = (status, text)

    def _end(self) -> None:
        assert not self._ended.is_set(), "the call was answered twice"
        self._ended.set()

    async def answer(self) -> bytes:
        """The reply's message, once the call has ended. Raises RefusedError."""
        await asyncio.wait_for(self._ended.wait(), 60)
        if self.failure is not None:
            raise RefusedError(*self.failure)
        return b"".join(self.parts or ())


async def call_unary(
    methods: Mapping[str, Method], path: str, request: Message | bytes, reply: type[MessageT], **details: Any
) -> MessageT:
    """Call the handler of a full path, or of one of GRPCInferenceService's methods. Raises RefusedError."""
    message = request if isinstance(request, bytes) else request.SerializeToString()
    call = Call(message, **details)
    handler = methods[path if path.startswith("/") else f"/inference.GRPCInferenceService/{path}"].unary
    assert handler is not None, f"{path} is not unary"
    handler(call)
    return reply.FromString(await call.answer())


class OpenStream:
    """A streaming call in progress; leave it by `finish`, `cancel` or by reading its end."""

    # Whether the wire that this plays offers `send_now`.
    sends_now = True

    def __init__(self, method: Method, metadata: Mapping[str, str | bytes] | None = None) -> None:
        assert method.stream is not None, "the method does not stream"
        self._requests: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._replies: asyncio.Queue[bytes] = asyncio.Queue()
        self.num_read = 0
        # Cleared by a test to play a client that does not read.
        self.has_room = asyncio.Event()
        self.has_room.set()
        send_now = self._take_now if self.sends_now else None
        call = StreamCall(self._messages(), self._take, metadata or {}, send_now=send_now)
        self.task = asyncio.ensure_future(method.stream(call))

    async def _messages(self) -> AsyncIterator[bytes]:
        while (message := await self._requests.get()) is not None:
            if isinstance(message, Exception):
                raise message
            self.num_read += 1
            yield message

    async def _take(self, parts: Parts) -> None:
        await self.has_room.wait()
        self._replies.put_nowait(b"".join(parts))

    def _take_now(self, parts: Parts) -> bool:
        if self.has_room.is_set():
            self._replies.put_nowait(b"".join(parts))
        return self.has_room.is_set()

    def send(self, request: Message | bytes) -> None:
        self._requests.put_nowait(request if isinstance(request, bytes) else request.SerializeToString())

    def break_off(self, error: Exception) -> None:
        """As a wire that fails while it reads requests."""
        self._requests.put_nowait(error)

    def half_close(self) -> None:
        self._requests.put_nowait(None)

    async def receive(self, reply: type[MessageT]) -> MessageT:
        return reply.FromString(await asyncio.wait_for(self._replies.get(), 60))

    @property
    def num_unread(self) -> int:
        return self._replies.qsize()

    async def status(self) -> tuple[Status, str]:
        """How the call ended, once it has."""
        try:
            await asyncio.wait_for(self.task, 60)
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
