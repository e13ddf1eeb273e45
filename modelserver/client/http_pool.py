"""Calls over HTTP/1.1 with kept connections: whole answers, and answers that are read as they come."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from time import monotonic

from modelserver.client.address import Address
from modelserver.client.call_error import CallError, http_error, not_connected
from modelserver.client.heads import AnswerHead, failure_text
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Lane
from modelserver.core.tensor import Buffer
from modelserver.endpoints.endpoint import Outcome

CONNECT_TIMEOUT_S = 1.0
# Servers close connections that are idle for a minute or more: ours go first.
MAX_IDLE_S = 30.0
MAX_CONNECTIONS = 128
# A kept connection that breaks so soon after a request was closed by the server before it came.
REUSE_RACE_S = 0.05
# What is read ahead of the reader of a stream.
READ_AHEAD_BYTES = 256 * 1024


class _Connection(HttpLane):
    """A connection of a pool; it gives what arrives to the call that has it."""

    def __init__(self, address: Address, pool: HttpPool) -> None:
        super().__init__(address, pool)
        self.keeps_answer = True
        self.call: HttpCall | None = None
        self.idle_since_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def begin(self, head: AnswerHead) -> None:
        if self.call is not None:
            self.call.on_head(head)

    def take(self, piece: bytes, now_ns: int) -> None:
        del now_ns
        if self.call is not None:
            self.call.on_piece(piece)

    def pause(self, *, is_paused: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def lose(self, reason: str) -> None:
        """Break the connection; a call in flight fails."""
        self._fail(0, reason)


class HttpCall:
    """One request in flight. `close` must follow, whatever happens; it may come before the end of the answer."""

    def __init__(self, pool: HttpPool, connection: _Connection, *, is_reused: bool) -> None:
        self.head: AnswerHead | None = None
        self._pool = pool
        self._connection: _Connection | None = connection
        self._is_reused = is_reused
        self._began_s = monotonic()
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._reads_all = False
        self._is_paused = False
        self._is_done = False
        self._failure: str | None = None
        self._news = asyncio.Event()
        connection.call = self

    # Called by the connection.

    def on_head(self, head: AnswerHead) -> None:
        self.head = head
        self._news.set()

    def on_piece(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._news.set()
        if self._num_bytes > READ_AHEAD_BYTES and not self._reads_all and not self._is_paused:
            assert self._connection is not None, "pieces come from it"
            self._is_paused = True
            self._connection.pause(is_paused=True)

    def on_end(self, failure: str | None) -> None:
        self._is_done = True
        # An error answer that is complete is a failure for a lane, and an answer for us.
        self._failure = None if failure is not None and failure.startswith("HTTP ") else failure
        self._news.set()

    # Called by the reader.

    async def wait_for_head(self) -> AnswerHead:
        """Raises CallError if the connection breaks, or for an answer that is an error, with the server's words."""
        while self.head is None:
            self._check()
            await self._wait()
        if self.head.status >= 300:
            raise self._error(self.head, await self.read())
        return self.head

    async def read(self) -> bytes:
        """The rest of the body. Raises CallError."""
        self._reads_all = True
        self._resume()
        while not self._is_done:
            await self._wait()
        self._check()
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
        """The lines of the body, without their ends."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    def close(self) -> None:
        """Give the connection back if the answer was complete, else break it."""
        self._resume()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.call = None
            self._pool.put_back(connection, is_complete=self._is_done and not self._failure)

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _resume(self) -> None:
        if self._is_paused and self._connection is not None:
            self._is_paused = False
            self._connection.pause(is_paused=False)

    def _check(self) -> None:
        if self._failure is None:
            return
        is_race = self.head is None and self._is_reused and monotonic() - self._began_s < REUSE_RACE_S
        raise CallError(self._failure, outcome=Outcome.LOST, is_unprocessed=is_race)

    def _error(self, head: AnswerHead, body: bytes) -> CallError:
        after = head.fields.get(b"retry-after", b"").decode(errors="replace")
        retry_after_s = float(after) if after.isascii() and after.isdigit() else None
        error = http_error(head.status, failure_text(head.status, body), retry_after_s)
        error.body = body
        return error


class HttpPool:
    """The connections to one address. On one event loop."""

    def __init__(
        self,
        address: Address,
        *,
        max_connections: int = MAX_CONNECTIONS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._context: ssl.SSLContext | None = None
        self._room = asyncio.Semaphore(max_connections)
        self._idle: deque[_Connection] = deque()
        self._used: set[_Connection] = set()

    async def open(self, method: str, path: str, headers: Mapping[str, str], body: Sequence[Buffer] = ()) -> HttpCall:
        """Send a request; `wait_for_head` of the call tells how it went. Raises CallError if there is no connection."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address.authority}"]
        if method != "GET":
            lines.append(f"Content-Length: {sum(map(len, body))}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = b"".join((("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace"), *body))
        await self._room.acquire()
        try:
            connection, is_reused = self._kept(), True
            if connection is None:
                connection, is_reused = await self._connect(), False
        except BaseException:
            self._room.release()
            raise
        self._used.add(connection)
        call = HttpCall(self, connection, is_reused=is_reused)
        connection.send(request)
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

    def put_back(self, connection: _Connection, *, is_complete: bool) -> None:
        """A call has ended; called by it."""
        if connection in self._used:
            self._used.discard(connection)
            self._room.release()
        if is_complete and connection.is_open:
            connection.idle_since_s = monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    def lose(self, reason: str) -> None:
        """Break all connections: the calls in flight fail with `reason`."""
        idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()
        for connection in list(self._used):
            connection.lose(reason)

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        """As an owner of lanes."""
        del now_ns
        if isinstance(lane, _Connection) and lane.call is not None:
            lane.call.on_end(failure)

    def responded(self, lane: Lane) -> None:
        """An answer of HTTP is one response."""

    def _kept(self) -> _Connection | None:
        """The connection that was used last, if it is still good; those that were idle for long are closed."""
        oldest_s = monotonic() - MAX_IDLE_S
        while self._idle and (not self._idle[0].is_open or self._idle[0].idle_since_s < oldest_s):
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        if self.address.tls is not None and self._context is None:
            self._context = self.address.tls.context("http/1.1")
        connection = _Connection(self.address, self)
        try:
            await self.address.open(lambda: connection, self._context, self._connect_timeout_s)
        except OSError as error:
            raise not_connected(connect_failure(error, self._connect_timeout_s)) from None
        return connection


def connect_failure(error: OSError, timeout_s: float) -> str:
    """Why a connection was not opened, without the address."""
    if isinstance(error, TimeoutError):
        return f"no connection within {timeout_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return f"no TLS: {error}" if isinstance(error, ssl.SSLError) else f"no connection: {error}"


async def http_lines(pool: HttpPool, path: str, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The lines of a document that may go on for ever. Raises CallError."""
    call = await pool.open("GET", path, headers)
    try:
        await call.wait_for_head()
        async for line in call.lines():
            yield line
    finally:
        call.close()
