"""Calls over gRPC on a few shared connections: one response, or several that are read as they come."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Sequence

from modelserver.client.address import Address, connect_failure
from modelserver.client.call_error import CallError, grpc_error, http_error, not_connected
from modelserver.client.grpc_lane import describe_end
from modelserver.client.grpc_messages import PREFIX_BYTES
from modelserver.client.h2_connection import H2Connection
from modelserver.client.h2_incoming import Head, Unprocessed
from modelserver.client.heads import GrpcRequestHead
from modelserver.client.http_pool import CONNECT_TIMEOUT_S
from modelserver.core.tensor import Buffer
from modelserver.endpoints.endpoint import Outcome
from modelserver.errors import ErrorCode, UnavailableError
from modelserver.wire.http2.hpack import literal

MAX_CONNECTIONS = 4
# Streams of a connection before another one is opened.
STREAMS_PER_CONNECTION = 64
WINDOW_BYTES = 4 * 2**20
# Messages that wait for the reader of a stream before the server is held back.
MAX_UNREAD = 16
_USUAL_METHOD = "ModelInfer"


class GrpcCall:
    """One call in flight. `close` must follow, whatever happens; it may come before the end."""

    def __init__(self, connection: H2Connection) -> None:
        self._connection = connection
        self._stream_id = 0
        self._rest = bytearray()
        self._messages: deque[bytes] = deque()
        self._unacknowledged = 0
        self._is_done = False
        self._error: CallError | None = None
        self._http_status = 200
        self._news = asyncio.Event()
        self.has_received = False

    def begin(self, stream_id: int) -> None:
        self._stream_id = stream_id

    # Called by the connection.

    def on_open(self, stream_id: int) -> None:
        self._stream_id = stream_id

    def on_head(self, head: Head, now_ns: int) -> None:
        del now_ns
        self._http_status = head.http_status or 0

    def on_data(self, buffer: bytes, start: int, end: int, now_ns: int) -> None:
        del now_ns
        self._rest += buffer[start:end]
        self._unacknowledged += end - start
        rest = self._rest
        while len(rest) >= PREFIX_BYTES:
            stop = PREFIX_BYTES + int.from_bytes(rest[1:PREFIX_BYTES], "big")
            if len(rest) < stop:
                break
            self._messages.append(bytes(rest[PREFIX_BYTES:stop]))
            del rest[:stop]
            self.has_received = True
            self._news.set()
        self._acknowledge()

    def on_end(self, head: Head | None, now_ns: int, problem: str | None) -> None:
        del now_ns
        self._is_done = True
        self._stream_id = 0
        self._error = self._error_of(head, problem)
        self._news.set()

    def _error_of(self, head: Head | None, problem: str | None) -> CallError | None:
        if problem is not None:
            return CallError(problem, outcome=Outcome.LOST, is_unprocessed=isinstance(problem, Unprocessed))
        if head is None or head.grpc_status is None:
            if self._http_status != 200:
                return http_error(self._http_status, describe_end(head))
            return CallError(describe_end(head), code=ErrorCode.INTERNAL, outcome=Outcome.SERVER_ERROR)
        if head.grpc_status == 0:
            return None
        retry_after_s = None if head.pushback_ms is None else head.pushback_ms / 1000
        error = grpc_error(head.grpc_status, describe_end(head), retry_after_s)
        error.is_unprocessed = error.is_unprocessed and not self.has_received
        return error

    def _acknowledge(self) -> None:
        """Let the server send more, unless the reader is far behind."""
        if self._unacknowledged >= WINDOW_BYTES // 4 and len(self._messages) < MAX_UNREAD and self._stream_id:
            unacknowledged, self._unacknowledged = self._unacknowledged, 0
            self._connection.acknowledge(self._stream_id, unacknowledged)

    # Called by the reader.

    async def message(self) -> bytes | None:
        """The next message; None after the last one, if the call ended well. Raises CallError."""
        while not self._messages:
            if self._is_done:
                if self._error is not None:
                    raise self._error
                return None
            self._news.clear()
            await self._news.wait()
        message = self._messages.popleft()
        self._acknowledge()
        return message

    def close(self) -> None:
        """Cancel the call, unless it has ended."""
        if self._stream_id and not self._is_done:
            self._is_done = True
            self._connection.cancel(self._stream_id)


class GrpcPool:
    """The connections to one address. On one event loop."""

    def __init__(
        self,
        address: Address,
        *,
        max_connections: int = MAX_CONNECTIONS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.address = address
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._context: ssl.SSLContext | None = None
        self._connections: list[H2Connection] = []
        self._opening = asyncio.Lock()

    async def open(
        self, method: str, message: Sequence[Buffer], headers: Mapping[str, str], *, timeout_s: float | None = None
    ) -> GrpcCall:
        """Send a message to a method of the inference service, and end our side. Raises CallError if there is no
        connection."""
        size = sum(map(len, message))
        data = b"".join((b"\x00", size.to_bytes(4, "big"), *message))
        more = dict(headers)
        if timeout_s is not None:
            more["grpc-timeout"] = f"{max(1, min(int(timeout_s * 1000), 99_999_999))}m"
        connection = self._with_room() or await self._connect()
        call = GrpcCall(connection)
        if method == _USUAL_METHOD:
            block, extra = b"", _literals(more)
        else:
            block, extra = b"".join(literal(*field) for field in self._fields(method, more)), b""
        call.begin(connection.open_with(call, data, block=block, more=extra))
        return call

    async def ask(
        self, method: str, message: Sequence[Buffer], headers: Mapping[str, str], *, timeout_s: float | None = None
    ) -> bytes:
        """The one response. Raises CallError."""
        call = await self.open(method, message, headers, timeout_s=timeout_s)
        try:
            answer = await call.message()
            if answer is None or await call.message() is not None:
                raise CallError("expected one message", code=ErrorCode.INTERNAL, outcome=Outcome.SERVER_ERROR)
            return answer
        finally:
            call.close()

    def lose(self, reason: str) -> None:
        """Break all connections: the calls in flight fail with `reason`."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.lose(reason)

    def _fields(self, method: str, headers: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
        return GrpcRequestHead(self.address, method, headers, user_agent="modelserver").fields

    def _with_room(self) -> H2Connection | None:
        """The open connection with the fewest streams; None if another one should be opened."""
        self._connections = [each for each in self._connections if each.is_open]
        best = min(self._connections, key=lambda each: each.num_streams, default=None)
        if best is None or not best.has_room:
            return None
        if best.num_streams >= STREAMS_PER_CONNECTION and len(self._connections) < self._max_connections:
            return None
        return best

    async def _connect(self) -> H2Connection:
        async with self._opening:
            connection = self._with_room()
            if connection is not None:
                return connection
            if self.address.tls is not None and self._context is None:
                self._context = self.address.tls.context("h2")
            connection = H2Connection(self.address, self._fields(_USUAL_METHOD, {}), window_bytes=WINDOW_BYTES)
            opened = connection
            try:
                await self.address.open(lambda: opened, self._context, self._connect_timeout_s)
                await connection.greet(self._connect_timeout_s)
            except OSError as error:
                raise not_connected(connect_failure(error, self._connect_timeout_s)) from None
            except UnavailableError:
                raise not_connected(f"no HTTP/2 within {self._connect_timeout_s:g} s: does it speak gRPC?") from None
            self._connections.append(connection)
            return connection


def _literals(headers: Mapping[str, str]) -> bytes:
    return b"".join(literal(name.lower().encode(), value.encode()) for name, value in headers.items())
