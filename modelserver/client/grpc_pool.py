"""Calls over gRPC on a few shared connections: one response, or several that are read as they come."""

from __future__ import annotations

import abc
import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import unquote_to_bytes

from modelserver.client.address import Address, connect_failure
from modelserver.client.call_error import CallError, grpc_error, http_error, not_connected
from modelserver.client.grpc_messages import PREFIX_BYTES, status_name
from modelserver.client.h2_connection import AskingCall, H2Connection, SentCall
from modelserver.client.h2_heads import AnswerBlock
from modelserver.client.heads import GrpcRequestHead
from modelserver.client.http_pool import CONNECT_TIMEOUT_S
from modelserver.core.tensor import Buffer
from modelserver.endpoints.endpoint import Outcome
from modelserver.errors import ErrorCode, ServerError, UnavailableError
from modelserver.wire.context import Arena
from modelserver.wire.http2.frame import DEFAULT_FRAME_BYTES
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.hpack_tables import Field
from modelserver.wire.sockets.poller import Poller

# For a server's settings, once it has taken the connection.
SETTINGS_TIMEOUT_S: Final = 10.0
# Of calls that are awaited.
MAX_CONNECTIONS: Final = 4
# Calls of a connection before another one is opened.
CALLS_PER_CONNECTION: Final = 64
WINDOW_BYTES: Final = 4 << 20
# Messages that wait for the reader of a stream before the server is held back.
MAX_UNREAD: Final = 16
_USUAL_METHOD: Final = "ModelInfer"


class ConnectingCall(AskingCall):
    """A call for which a pool opens a connection."""

    __slots__ = ()

    @abc.abstractmethod
    def connected(self, connection: H2Connection) -> None:
        """A connection was opened, which has room for this call."""

    @abc.abstractmethod
    def unreachable(self, reason: str) -> None:
        """No connection could be opened."""


def describe_end(trailers: AnswerBlock | None) -> str:
    """The message in the fields that end a failed call."""
    if trailers is None:
        return "the stream ended without a gRPC status"
    if trailers.grpc_status is None:
        return f"HTTP {trailers.http_status} without a gRPC status"
    message = unquote_to_bytes(trailers.grpc_message).decode(errors="replace")
    return f"{status_name(trailers.grpc_status)}: {message}"


class GrpcCall(ConnectingCall):
    """One call in flight. `close` must follow, whatever happens; it may come before the end."""

    def __init__(self, pool: GrpcPool, data: bytes, block: bytes, more: bytes) -> None:
        self._pool = pool
        self._request = data, block, more
        # Its place on a connection, from its start to its end.
        self._sent: SentCall | None = None
        self._rest = bytearray()
        self._messages: deque[bytes] = deque()
        self._is_done = False
        self._error: CallError | None = None
        self._http_status = 200
        self._news = asyncio.Event()
        self.has_received = False

    # Called by the pool and the connection.

    def connected(self, connection: H2Connection) -> None:
        data, block, more = self._request
        self._sent = connection.open(self, data, block=block, more=more)

    def unreachable(self, reason: str) -> None:
        self._finish(not_connected(reason))

    def begun(self, head: AnswerBlock) -> None:
        self._http_status = head.http_status or 0

    def more(self, data: bytes) -> None:
        rest = self._rest
        rest += data
        while len(rest) >= PREFIX_BYTES:
            stop = PREFIX_BYTES + int.from_bytes(rest[1:PREFIX_BYTES], "big")
            if len(rest) < stop:
                break
            self._messages.append(bytes(rest[PREFIX_BYTES:stop]))
            del rest[:stop]
            self.has_received = True
            self._news.set()
        self._widen()

    def ended(self, trailers: AnswerBlock | None) -> None:
        self._finish(self._error_of(trailers))

    def lost(self, reason: str, code: int | None, *, is_refused: bool) -> None:
        del code
        self._finish(CallError(reason, outcome=Outcome.LOST, is_unprocessed=is_refused))

    def _finish(self, error: CallError | None) -> None:
        self._sent = None
        self._is_done = True
        self._error = error
        self._news.set()

    def _error_of(self, trailers: AnswerBlock | None) -> CallError | None:
        if trailers is None or trailers.grpc_status is None:
            http_status = self._http_status if trailers is None else trailers.http_status or self._http_status
            if http_status != 200:
                return http_error(http_status, describe_end(trailers))
            return CallError(describe_end(trailers), code=ErrorCode.INTERNAL, outcome=Outcome.SERVER_ERROR)
        if trailers.grpc_status == 0:
            return None
        retry_after_s = None if trailers.pushback_ms is None else trailers.pushback_ms / 1000
        error = grpc_error(trailers.grpc_status, describe_end(trailers), retry_after_s)
        error.is_unprocessed = error.is_unprocessed and not self.has_received
        return error

    def _widen(self) -> None:
        """Let the server send more, unless the reader is far behind."""
        if self._sent is not None and len(self._messages) < MAX_UNREAD:
            self._sent.widen()

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
        self._widen()
        return message

    def close(self) -> None:
        """Cancel the call, unless it has ended."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.reset()
        elif not self._is_done:
            self._pool.stop_waiting(self)
        self._is_done = True


class GrpcPool:
    """The connections to one address. On one event loop.

    `open` and `ask` are for coroutines; others `begin` their calls, and are called back.
    """

    def __init__(
        self,
        address: Address,
        *,
        fields: Sequence[Field] | None = None,
        frame_bytes: int = DEFAULT_FRAME_BYTES,
        window_bytes: int = WINDOW_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        calls_per_connection: int = CALLS_PER_CONNECTION,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        settings_timeout_s: float | None = None,
        poller: Poller | None = None,
        arena: Arena | None = None,
    ) -> None:
        """`fields` is the usual head of requests: without it, that of ModelInfer.

        There may be more connections than `max_connections` where a server allows few calls on each. Within
        `settings_timeout_s` a server must say something on a connection that it has taken. Connections without TLS are
        watched by `poller`, if there is one. The pools of a loop may share `arena`.
        """
        self.address = address
        self._fields = self._fields_of(_USUAL_METHOD, {}) if fields is None else fields
        self._frame_bytes = frame_bytes
        self._window_bytes = window_bytes
        self._max_connections = max_connections
        self._calls_per_connection = calls_per_connection
        self._connect_timeout_s = connect_timeout_s
        self._settings_timeout_s = settings_timeout_s or connect_timeout_s
        self._poller = poller
        self._arena = arena or Arena()
        self._context: ssl.SSLContext | None = None
        self._connections: list[H2Connection] = []
        # Calls that wait for the connection that is being opened.
        self._waiting: list[ConnectingCall] = []
        self._connecting: asyncio.Task[None] | None = None

    # Awaited calls.

    def open(
        self, method: str, message: Sequence[Buffer], headers: Mapping[str, str], *, timeout_s: float | None = None
    ) -> GrpcCall:
        """Send a message to a method of the inference service, and end our side."""
        size = sum(map(len, message))
        data = b"".join((b"\x00", size.to_bytes(4, "big"), *message))
        extra = dict(headers)
        if timeout_s is not None:
            extra["grpc-timeout"] = f"{max(1, min(int(timeout_s * 1000), 99_999_999))}m"
        block = more = b""
        if method == _USUAL_METHOD:
            more = b"".join(literal(name.lower().encode(), value.encode()) for name, value in extra.items())
        else:
            block = b"".join(literal(*field) for field in self._fields_of(method, extra))
        call = GrpcCall(self, data, block, more)
        self.begin(call)
        return call

    async def ask(
        self, method: str, message: Sequence[Buffer], headers: Mapping[str, str], *, timeout_s: float | None = None
    ) -> bytes:
        """The one response. Raises CallError."""
        call = self.open(method, message, headers, timeout_s=timeout_s)
        try:
            answer = await call.message()
            if answer is None or await call.message() is not None:
                raise CallError("expected one message", code=ErrorCode.INTERNAL, outcome=Outcome.SERVER_ERROR)
            return answer
        finally:
            call.close()

    def lose(self, reason: str) -> None:
        """Break all connections: the calls fail with `reason`."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.lose(reason)
        self._tell_waiting(None, reason)

    def _fields_of(self, method: str, headers: Mapping[str, str]) -> tuple[Field, ...]:
        return GrpcRequestHead(self.address, method, headers, user_agent="modelserver").fields

    # Calls that are called back.

    def begin(self, asking: ConnectingCall) -> None:
        """Give a call a connection, now or as soon as one is opened."""
        connection = self._with_room()
        if connection is not None:
            asking.connected(connection)
            return
        self._waiting.append(asking)
        if self._connecting is None:
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect(), name=f"connect to {self.address}")

    def stop_waiting(self, asking: ConnectingCall) -> None:
        """The call needs no connection any more."""
        with suppress(ValueError):
            self._waiting.remove(asking)

    def _with_room(self) -> H2Connection | None:
        """The connection with the fewest calls; None if another one should be opened."""
        best: H2Connection | None = None
        for connection in self._connections:
            if connection.has_room and (best is None or len(connection.calls) < len(best.calls)):
                best = connection
        if best is None or len(best.calls) >= self._calls_per_connection:
            self._connections = [each for each in self._connections if not each.is_leaving]
            if best is None or len(self._connections) < self._max_connections:
                return None
        return best

    async def _connect(self) -> None:
        connection, reason = None, "the server takes no calls"
        try:
            if self.address.tls is not None and self._context is None:
                self._context = self.address.tls.context("h2")
            opened = self._new()
            await self.address.open(lambda: opened, self._context, self._connect_timeout_s, self._poller)
            await opened.greet(self._settings_timeout_s)
            connection = opened
            self._connections.append(connection)
        except OSError as error:
            reason = connect_failure(error, self._connect_timeout_s)
        except ServerError as error:
            reason = error.message
        self._connecting = None
        self._tell_waiting(connection, reason)

    def _tell_waiting(self, connection: H2Connection | None, reason: str) -> None:
        waiting, self._waiting = self._waiting, []
        for asking in waiting:
            if connection is None or not (connection.has_room or connection.calls):
                asking.unreachable(reason)
            else:
                self.begin(asking)

    def _new(self) -> H2Connection:
        return H2Connection(self._arena, self._fields, frame_bytes=self._frame_bytes, window_bytes=self._window_bytes)

    async def prepare(self) -> H2Connection:
        """Open a connection before the first call. Raises UnavailableError, with advice for a person."""
        connection = self._new()
        await self.address.connect(lambda: connection, "h2")
        try:
            await connection.greet(SETTINGS_TIMEOUT_S)
        except UnavailableError as error:
            raise UnavailableError(f"cannot call {self.address}: {error.message}") from None
        self._connections.append(connection)
        return connection

    # The end.

    def abandon(self) -> None:
        """Drop the connections; whoever asks is not called again."""
        self._waiting.clear()
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in self._connections:
            connection.abandon()

    async def finish(self, timeout_s: float) -> None:
        """End all calls politely, and close."""
        await asyncio.gather(*(connection.finish(timeout_s) for connection in self._connections))
        self.abandon()

    def close(self) -> None:
        """Close each connection after its last call."""
        for connection in self._connections:
            connection.close()

    async def stop(self) -> None:
        """Close as `close`, and open no connection any more."""
        self.close()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
