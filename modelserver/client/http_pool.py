"""Kept connections to one address over HTTP/1.1: for requests that are called back, and for calls that are awaited."""

from __future__ import annotations

import abc
import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic

from modelserver.client.address import Address, connect_failure
from modelserver.client.call_error import CallError, http_error, not_connected
from modelserver.client.heads import AnswerHead, AnswerHeads, failure_text
from modelserver.client.http_connection import Asking, ConnectionOwner, HttpConnection
from modelserver.core.tensor import Buffer
from modelserver.endpoints.endpoint import Outcome
from modelserver.errors import ServerError
from modelserver.wire.context import Arena
from modelserver.wire.sockets.poller import Poller

CONNECT_TIMEOUT_S = 1.0
# Servers close connections that are idle for a minute or more: ours go first.
MAX_IDLE_S = 30.0
# Calls that are awaited.
MAX_CONNECTIONS = 128
# A kept connection that breaks so soon after a request was closed by the server before it came.
REUSE_RACE_S = 0.05
# What is read ahead of the reader of a stream.
READ_AHEAD_BYTES = 256 * 1024
MAX_ERROR_BYTES = 1 << 20
# Of an event of a stream, or of an entry in a list of members.
MAX_LINE_BYTES = 16 << 20


class Connecting(Asking):
    """A request for which a pool opens a connection."""

    __slots__ = ()

    @abc.abstractmethod
    def connected(self, connection: HttpConnection) -> None:
        """A connection was opened for this request."""

    @abc.abstractmethod
    def unreachable(self, reason: str) -> None:
        """No connection could be opened."""


class HttpCall(Asking):
    """One request in flight. `close` must follow, whatever happens; it may come before the end of the answer."""

    is_bodyless = False

    def __init__(self, pool: HttpPool) -> None:
        self.head: AnswerHead | None = None
        self._pool = pool
        self._connection: HttpConnection | None = None
        self._is_reused = False
        self._began_s = monotonic()
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._reads_all = False
        self._is_paused = False
        self._is_done = False
        self._error: CallError | None = None
        self._news = asyncio.Event()

    def send(self, connection: HttpConnection, head: bytes, body: bytes, *, is_reused: bool) -> None:
        """Send the request on a free connection."""
        self._connection = connection
        self._is_reused = is_reused
        connection.ask(self, head, body)

    # Called by the connection.

    def answered(self, head: AnswerHead, body: bytes) -> None:
        self.begun(head)
        if body:
            self._pieces.append(body)
        self.ended()

    def begun(self, head: AnswerHead) -> None:
        self.head = head
        self._news.set()

    def more(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_bytes += len(data)
        self._news.set()
        if self._num_bytes > READ_AHEAD_BYTES and not self._reads_all and not self._is_paused:
            assert self._connection is not None, "pieces come from it"
            self._is_paused = True
            self._connection.pause()

    def ended(self) -> None:
        # The connection has gone back to its pool.
        self._connection = None
        self._is_done = True
        self._news.set()

    def lost(self, reason: str, *, is_refused: bool) -> None:
        is_race = self._is_reused and monotonic() - self._began_s < REUSE_RACE_S
        is_unprocessed = self.head is None and (is_refused or is_race)
        self._error = CallError(reason, outcome=Outcome.LOST, is_unprocessed=is_unprocessed)
        self.ended()

    # Called by the reader.

    async def wait_for_head(self) -> AnswerHead:
        """Raises CallError if the connection breaks, or for an answer that is an error, with the server's words."""
        while self.head is None:
            self._check()
            await self._wait()
        if self.head.status >= 300:
            raise _error_of(self.head, await self.read(MAX_ERROR_BYTES))
        return self.head

    async def read(self, most_bytes: int | None = None) -> bytes:
        """The rest of the body. Raises CallError, also for one that is longer than `most_bytes`."""
        self._reads_all = True
        self._resume()
        while not self._is_done and (most_bytes is None or self._num_bytes <= most_bytes):
            await self._wait()
        self._check()
        if not self._is_done:
            raise CallError(f"an answer of over {most_bytes} bytes", outcome=Outcome.LOST, is_unprocessed=False)
        pieces, self._pieces = self._pieces, deque()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes; no faster than it is read. Raises CallError."""
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._num_bytes -= len(piece)
                yield piece
            self._resume()
            if self._is_done:
                self._check()
                return
            await self._wait()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The lines of the body, without their ends. Raises CallError, also for one of over MAX_LINE_BYTES."""
        begun: list[bytes] = []
        num_bytes = 0
        async for piece in self.pieces():
            first, *others = piece.split(b"\n")
            begun.append(first)
            num_bytes += len(first)
            if num_bytes > MAX_LINE_BYTES:
                text = f"a line of over {MAX_LINE_BYTES} bytes"
                raise CallError(text, outcome=Outcome.LOST, is_unprocessed=False)
            if others:
                yield b"".join(begun).rstrip(b"\r")
                for line in others[:-1]:
                    yield line.rstrip(b"\r")
                begun, num_bytes = [others[-1]], len(others[-1])
        if num_bytes:
            yield b"".join(begun)

    def close(self) -> None:
        """Break the connection unless the answer was complete."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        self._pool.end(self)

    def lose(self, reason: str) -> None:
        """Break the connection; the call fails."""
        if self._connection is not None:
            self._connection.abandon()
            self.lost(reason, is_refused=False)

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._connection is not None:
                self._connection.resume()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def _error_of(head: AnswerHead, body: bytes) -> CallError:
    after = head.fields.get("retry-after", "")
    retry_after_s = float(after) if after.isascii() and after.isdigit() else None
    error = http_error(head.status, failure_text(head.status, body), retry_after_s)
    error.body = body
    return error


class HttpPool(ConnectionOwner):
    """The connections to one address. On one event loop.

    `open` and `ask` are for coroutines; others `take` a connection, or have one opened by `connect`.
    """

    def __init__(
        self,
        address: Address,
        *,
        max_connections: int = MAX_CONNECTIONS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        poller: Poller | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Connections without TLS are watched by `poller`, if there is one. The pools of a loop may share `arena`."""
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._poller = poller
        self._arena = arena
        self._context: ssl.SSLContext | None = None
        self._heads = AnswerHeads()
        self._room = asyncio.Semaphore(max_connections)
        self._calls: set[HttpCall] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        # The one that was used last is at the end.
        self._idle: deque[HttpConnection] = deque()

    # Awaited calls.

    async def open(self, method: str, path: str, headers: Mapping[str, str], body: Sequence[Buffer] = ()) -> HttpCall:
        """Send a request; `wait_for_head` of the call tells how it went. Raises CallError if there is no connection."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address.authority}"]
        if method != "GET":
            lines.append(f"Content-Length: {sum(map(len, body))}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
        await self._room.acquire()
        try:
            self.sweep()
            kept = self.take()
            connection = kept or await self._connect()
        except BaseException:
            self._room.release()
            raise
        call = HttpCall(self)
        self._calls.add(call)
        call.send(connection, head, b"".join(body), is_reused=kept is not None)
        return call

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: Sequence[Buffer] = ()
    ) -> tuple[AnswerHead, bytes]:
        """The whole answer. Raises CallError, also for one that is an error."""
        call = await self.open(method, path, headers, body)
        try:
            return await call.wait_for_head(), await call.read()
        finally:
            call.close()

    def end(self, call: HttpCall) -> None:
        """A call is closed; called by it."""
        if call in self._calls:
            self._calls.discard(call)
            self._room.release()

    def lose(self, reason: str) -> None:
        """Break all connections: the calls in flight fail with `reason`."""
        self.close()
        for call in list(self._calls):
            call.lose(reason)

    # Requests that are called back.

    def take(self) -> HttpConnection | None:
        """An idle connection, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def connect(self, asking: Connecting) -> asyncio.Task[None]:
        """Open a connection for a request, which may cancel this."""
        task = asyncio.get_running_loop().create_task(self._connect_for(asking), name=f"connect to {self.address}")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _connect_for(self, asking: Connecting) -> None:
        try:
            connection = await self._connect()
        except ServerError as error:
            asking.unreachable(error.message)
        else:
            asking.connected(connection)

    async def _connect(self) -> HttpConnection:
        """Raises CallError, or InvalidArgumentError for TLS files that cannot be used."""
        if self.address.tls is not None and self._context is None:
            self._context = self.address.tls.context("http/1.1")
        if self._arena is None:
            self._arena = Arena()
        connection = HttpConnection(self, self._heads, self._arena)
        try:
            await self.address.open(lambda: connection, self._context, self._connect_timeout_s, self._poller)
        except OSError as error:
            raise not_connected(connect_failure(error, self._connect_timeout_s)) from None
        return connection

    # Called by connections.

    def give_back(self, connection: HttpConnection) -> None:
        connection.idle_since_s = monotonic()
        self._idle.append(connection)

    def forget(self, connection: HttpConnection) -> None:
        with suppress(ValueError):
            self._idle.remove(connection)

    # The end.

    def sweep(self) -> None:
        """Close connections that were idle for long."""
        oldest_s = monotonic() - MAX_IDLE_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.popleft().abandon()

    def close(self) -> None:
        """Close idle connections; the others close when their answers are complete."""
        while self._idle:
            self._idle.pop().abandon()

    async def stop(self) -> None:
        """Close idle connections, and open none any more."""
        self.close()
        connecting = list(self._connecting)
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)


async def http_lines(pool: HttpPool, path: str, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The lines of a document that may go on for ever. Raises CallError."""
    call = await pool.open("GET", path, headers)
    try:
        await call.wait_for_head()
        async for line in call.lines():
            yield line
    finally:
        call.close()
