"""A streaming gRPC call: a Task per call, a bounded queue of messages in, flow control out."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Final

from modelserver.core.long_work import long_work
from modelserver.protocol.call import Parts, RpcError, StreamCall
from modelserver.protocol.grpc_status import Status
from modelserver.wire.address import peer_of
from modelserver.wire.http2.deadlines import Expiring
from modelserver.wire.http2.frame import pack_u32
from modelserver.wire.http2.grpc_compression import belongs_off_loop, compress
from modelserver.wire.http2.grpc_ending import (
    DEADLINE_TEXT,
    OK_TRAILERS,
    RESPONSE_HEADERS,
    end_call,
    internal_error,
    refuse,
)
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.inbox import Inbox
from modelserver.wire.http2.message import BudgetSpentError
from modelserver.wire.http2.sender import Outgoing
from modelserver.wire.http2.stream import (
    ABANDONED,
    ANSWERED,
    DONE,
    RUNNING,
    STREAM_SLOTS,
    Connection,
    Http2Stream,
    Route,
)

# Bytes waiting to be sent beyond which the handler waits.
_MAX_UNSENT_BYTES: Final = 64 * 1024
# Frames of small messages after which the handler lets others run.
_MAX_UNFLUSHED: Final = 128


class GrpcStream(Http2Stream, Expiring):
    """One streaming call from its HEADERS to its trailers.

    The Task runs from the head on. It is cancelled when the client leaves or the deadline passes.
    """

    __slots__ = (
        *STREAM_SLOTS,
        "_has_headers",
        "_inbox",
        "_task",
        "deadline_ns",
    )

    def __init__(self, connection: Connection, stream_id: int, route: Route) -> None:
        self.connection = connection
        self.id = stream_id
        self.route = route
        self.phase = RUNNING
        self.is_ended = False
        self.num_received = 0
        self.send_window = connection.sender.initial_window
        self.receive_window = connection.initial_window
        self.outgoing: Outgoing | None = None
        self.deadline_ns: int | None = None
        self._inbox = Inbox(self)
        self._has_headers = False
        if route.timeout_ns is not None:
            self.deadline_ns = time.monotonic_ns() + route.timeout_ns
            connection.context.deadlines.add(self, self.deadline_ns)
        peer = peer_of(connection.transport)
        call = StreamCall(self._inbox, self.send, route.head.metadata, self.deadline_ns, self.send_now, peer)
        self._task = connection.context.loop.create_task(self._run(call), name=f"grpc-stream-{stream_id}")
        # Not at the end of `_run`: a Task that is cancelled at once does not begin it.
        self._task.add_done_callback(self._settle)

    async def _run(self, call: StreamCall) -> None:
        """Run the handler, and end the call for the client as the handler ends."""
        failure: RpcError | None = None
        try:
            await self.route.handle(call)
        except RpcError as error:
            failure = error
        except asyncio.CancelledError:
            if self.is_open:  # not because of the client
                end_call(self, Status.UNAVAILABLE, "the server ended the call", has_headers=self._has_headers)
            raise
        except Exception as error:
            failure = internal_error(error)
        if self.is_open:
            self._end(failure)

    def _settle(self, _task: asyncio.Task[None]) -> None:
        if self.phase == ABANDONED:
            self.phase = DONE
            self.connection.settle_abandoned()

    def _end(self, failure: RpcError | None) -> None:
        self.phase = ANSWERED
        if failure is not None:
            end_call(self, failure.status, failure.message, has_headers=self._has_headers)
            return
        if not self._has_headers:
            self._send_headers()
        self.connection.queue(self, (), OK_TRAILERS)
        self.connection.schedule_flush()

    # Messages from the handler.

    async def send(self, parts: Parts) -> None:
        """Send a message; returns when there is room for more. Raises RpcError when the client has left."""
        self._check_open()
        flag = b"\0"
        if self.route.encoding is not None:
            parts, flag = (await self._compressed(parts, self.route.encoding),), b"\1"
            self._check_open()
        self._send(flag, parts)
        outgoing = self.outgoing
        if outgoing is not None and outgoing.num_bytes > _MAX_UNSENT_BYTES:
            outgoing.room = self.connection.context.loop.create_future()
            await outgoing.room
        elif len(self.connection.sender.frames) > _MAX_UNFLUSHED:
            await asyncio.sleep(0)  # let them be written: then it shows whether there is room

    def send_now(self, parts: Parts) -> bool:
        """Send a message if possible without waiting; returns whether it did."""
        outgoing = self.outgoing
        if (
            not self.is_open
            or self.route.encoding is not None
            or (outgoing is not None and outgoing.num_bytes > _MAX_UNSENT_BYTES)
            or len(self.connection.sender.frames) > _MAX_UNFLUSHED
        ):
            return False
        self._send(b"\0", parts)
        return True

    def _send(self, flag: bytes, parts: Parts) -> None:
        if not self._has_headers:
            self._send_headers()
        message = (flag + pack_u32(sum(map(len, parts))), *parts)
        if not self.connection.sender.send_data(self, message):
            self.connection.queue(self, message)
        self.connection.schedule_flush()

    def _check_open(self) -> None:
        if not self.is_open:
            raise RpcError(Status.CANCELLED, "the client has left")

    async def _compressed(self, parts: Parts, encoding: bytes) -> bytes:
        context = self.connection.context
        level = context.limits.grpc_compression
        if belongs_off_loop(sum(map(len, parts))):
            return await long_work().compute(partial(compress, parts, encoding, level))
        return compress(parts, encoding, level)

    def _send_headers(self) -> None:
        self._has_headers = True
        block = RESPONSE_HEADERS
        if self.route.encoding is not None:
            block += literal(b"grpc-encoding", self.route.encoding)
        self.connection.sender.send_block(self.id, block)

    # Messages from the client.

    def receive(self, data: memoryview) -> None:
        try:
            self._inbox.add(data)
        except RpcError as error:
            self._break(error)

    def room(self) -> memoryview | None:
        return self._inbox.room()

    def filled(self, num_bytes: int) -> None:
        try:
            self._inbox.filled(num_bytes)
        except RpcError as error:
            self._break(error)

    def end(self) -> None:
        self._inbox.tell()

    @property
    def is_within_message(self) -> bool:
        return self._inbox.is_within_message

    @property
    def awaits_body(self) -> bool:
        return not self.is_ended and self.is_open and self._inbox.awaits_rest

    # Ends that the handler did not cause.

    def tell_short(self) -> None:
        if self.is_open:
            self._break(BudgetSpentError())

    def _break(self, error: RpcError) -> None:
        """The client sent an invalid message."""
        refuse(self, error, has_headers=self._has_headers)
        self._task.cancel()

    def expire(self) -> None:
        if self.is_open:
            end_call(self, Status.DEADLINE_EXCEEDED, DEADLINE_TEXT, has_headers=self._has_headers)
            self._task.cancel()

    def dismiss(self, text: str) -> None:
        if self.phase != ANSWERED:
            end_call(self, Status.UNAVAILABLE, text, has_headers=self._has_headers)
            self._task.cancel()

    def cancel(self) -> None:
        self._task.cancel()

    def give_up(self, text: str) -> None:
        end_call(self, Status.DEADLINE_EXCEEDED, text, has_headers=self._has_headers)
        self._task.cancel()

    def release(self) -> None:
        if self.deadline_ns is not None:
            self.connection.context.deadlines.remove(self, self.deadline_ns)
        self._inbox.drop()
