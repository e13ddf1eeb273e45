"""Connections to replicas over HTTP/1.1: kept alive, one request at a time, answers handed on as they arrive."""

from __future__ import annotations

import abc
import asyncio
import socket
import ssl
from collections import deque
from contextlib import suppress
from typing import Final

from modelserver.client.address import Address
from modelserver.client.heads import ChunkedBody, MalformedAnswerError
from modelserver.core.recognition import Memory
from modelserver.core.tensor import Buffer
from modelserver.errors import UnavailableError
from modelserver.wire.context import Arena
from modelserver.wire.sockets.poller import Poller
from modelserver.wire.sockets.transport import SocketTransport

# Shorter than the idle timeout of common servers, so that it is the router that closes an idle connection.
IDLE_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 1.0
# A peer that does not answer this many probes of the system, one a second, is gone.
_SILENT_S: Final = 3
# After the end of a connection without an answer: until the peer's system would have refused our request.
_REFUSAL_WAIT_S: Final = 0.03
# TCP_CLOSE of Linux: the peer has reset the connection.
_TCP_CLOSED: Final = 7
_END_OF_HEAD: Final = b"\r\n\r\n"
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_HEADS: Final = 512
# Up to this size a body is sent in one piece with its head.
_MAX_JOINED_BYTES: Final = 32 * 1024
# Fields of one connection (RFC 9110, 7.6.1), and the length, which the wire writes.
HOP_FIELDS: Final = frozenset(
    {
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_BODYLESS: Final = frozenset({204, 304})


class AnswerHead:
    """The head of an answer. Equal heads share one: never change it.

    `headers` go to the client; `length` is None where the body is chunked or ends with the connection.
    """

    __slots__ = ("headers", "is_chunked", "is_last", "length", "media_type", "status")

    def __init__(self, raw: bytes) -> None:
        """`raw` ends with the empty line. Raises MalformedAnswerError."""
        lines = raw[: -len(_END_OF_HEAD)].decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise MalformedAnswerError(f"expected an HTTP/1.1 answer, got {lines[0][:60]!r}")
        self.status = int(words[1])
        fields: dict[str, str] = {}
        headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise MalformedAnswerError(f"expected a header, got {line[:60]!r}")
            value = value.strip(" \t")
            fields[name.lower()] = value
            if name.lower() not in HOP_FIELDS:
                headers.append((name, value))
        self.headers = tuple(headers)
        coding = fields.get("transfer-encoding", "").lower()
        if coding not in ("", "chunked"):
            raise MalformedAnswerError(f"Transfer-Encoding is {coding[:40]!r}")
        self.is_chunked = coding == "chunked"
        length = fields.get("content-length")
        if length is not None and not (length.isascii() and length.isdigit()):
            raise MalformedAnswerError(f"Content-Length is {length[:40]!r}")
        self.length = int(length) if length is not None and not self.is_chunked else None
        options = fields.get("connection", "").lower()
        is_1_0 = words[0] == "HTTP/1.0"
        has_end = self.length is not None or self.is_chunked or self.status in _BODYLESS
        self.is_last = "close" in options or (is_1_0 and "keep-alive" not in options) or not has_end
        self.media_type = fields.get("content-type", "").partition(";")[0].strip().lower()


class Asking(abc.ABC):
    """A request that waits for a replica's answer, as its connection sees it."""

    __slots__ = ()

    # HEAD: the answer has a length and no body.
    is_bodyless: bool

    @abc.abstractmethod
    def connected(self, upstream: HttpUpstream) -> None:
        """A connection was opened for this request."""

    @abc.abstractmethod
    def unreachable(self, reason: str) -> None:
        """No connection could be opened."""

    @abc.abstractmethod
    def answered(self, head: AnswerHead, body: bytes) -> None:
        """The whole answer arrived at once."""

    @abc.abstractmethod
    def begun(self, head: AnswerHead) -> None:
        """The head of an answer arrived whose body follows: `more` until `ended`, or `lost`."""

    @abc.abstractmethod
    def more(self, data: bytes) -> None: ...

    @abc.abstractmethod
    def ended(self) -> None: ...

    @abc.abstractmethod
    def lost(self, reason: str, *, is_refused: bool) -> None:
        """The connection broke before the end of the answer.

        `is_refused`: the replica's process never read the whole request, so it may be sent again.
        """

    @abc.abstractmethod
    def has_room(self) -> None:
        """More of the request's body can be sent again."""


class HttpUpstream(asyncio.BufferedProtocol):
    """One connection. Event loop thread only."""

    __slots__ = (
        "_arena",
        "_asking",
        "_chunks",
        "_head",
        "_is_paused",
        "_is_whole",
        "_left",
        "_pool",
        "_rest",
        "idle_since_s",
        "is_full",
        "is_lost",
        "transport",
    )

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._arena = pool.arena.view
        self.transport: asyncio.Transport
        self._asking: Asking | None = None
        # Of the answer that is being received: its head, the bytes to come of a body of known length, its chunks.
        self._head: AnswerHead | None = None
        self._left = 0
        self._chunks: ChunkedBody | None = None
        self._rest = b""
        # Whether the whole request was handed to the transport.
        self._is_whole = True
        self._is_paused = False
        self.idle_since_s = 0.0
        self.is_full = False
        self.is_lost = False

    # Called by the request.

    def ask(self, asking: Asking, head: bytes, body: Buffer, *, is_whole: bool = True) -> None:
        """Send a request; with `is_whole` False, more of its body follows by `send`."""
        self._asking = asking
        self._is_whole = is_whole
        if len(body) <= _MAX_JOINED_BYTES:
            self.transport.write(head + body if body else head)
        else:
            self.transport.writelines((head, body))

    def send(self, data: Buffer, *, is_whole: bool = False) -> None:
        """Send more of the request's body; the caller minds `is_full`."""
        self._is_whole = is_whole
        if data:
            self.transport.write(data)

    def abandon(self) -> None:
        """The answer is no longer wanted: the replica learns of it by the end of the connection."""
        self._asking = None
        self.transport.abort()

    def pause(self) -> None:
        """Receive nothing until `resume`."""
        self._is_paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self.is_lost:
            self._is_paused = False
            self.transport.resume_reading()

    def close(self) -> None:
        """Close an idle connection."""
        self.transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self.transport = transport  # type: ignore[assignment]

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._arena

    def buffer_updated(self, nbytes: int) -> None:
        data = self._arena[:nbytes].tobytes()
        try:
            self._receive(data)
        except MalformedAnswerError as error:
            self._break(f"the answer cannot be read: {error}")

    def eof_received(self) -> bool:
        """The replica sends no more. Without an answer, find out whether its system refuses the request."""
        if self._asking is None or self._head is not None or self._rest:
            return False
        self._pool.loop.call_later(_REFUSAL_WAIT_S, self._judge)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        asking, self._asking = self._asking, None
        self._pool.forget(self)
        if asking is None:
            return
        head = self._head
        if head is not None and error is None and head.length is None and not head.is_chunked:
            asking.ended()
            return
        has_answer = head is not None or bool(self._rest)
        is_reset = isinstance(error, ConnectionResetError | BrokenPipeError)
        is_refused = not has_answer and (is_reset or not self._is_whole)
        where = "within its answer" if has_answer else "without an answer"
        asking.lost(f"the connection broke {where}" + (f": {error}" if error else ""), is_refused=is_refused)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self._asking is not None:
            self._asking.has_room()

    # The answer.

    def _receive(self, data: bytes) -> None:
        if self._head is not None:
            self._read_body(data)
            return
        if self._rest:
            data = self._rest + data
        end = data.find(_END_OF_HEAD)
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES:
                raise MalformedAnswerError(f"a head of over {_MAX_HEAD_BYTES} bytes")
            self._rest = data
            return
        end += len(_END_OF_HEAD)
        self._rest = b""
        head = self._pool.read_head(data[:end])
        asking = self._asking
        if asking is None:
            raise MalformedAnswerError("an answer without a request")
        if head.status < 200:
            if end < len(data):
                self._receive(data[end:])
            return
        length = 0 if asking.is_bodyless or head.status in _BODYLESS else head.length
        if length is not None and len(data) - end >= length:
            if len(data) - end > length:
                raise MalformedAnswerError("more bytes than the answer announced")
            self._finish(head)
            asking.answered(head, data[end:])
            return
        self._head = head
        self._left = length or 0
        self._chunks = ChunkedBody() if head.is_chunked else None
        asking.begun(head)
        if end < len(data) and self._asking is asking:
            self._read_body(data[end:])

    def _read_body(self, data: bytes) -> None:
        head, asking = self._head, self._asking
        if asking is None or head is None:
            return  # it was abandoned
        if self._chunks is not None:
            piece = self._chunks.feed(data)
            is_done = self._chunks.is_done
        else:
            piece = data
            if head.length is not None and len(data) > self._left:
                raise MalformedAnswerError("more bytes than the answer announced")
            self._left -= len(data)
            is_done = head.length is not None and not self._left
        if piece:
            asking.more(piece)
        if is_done and self._asking is asking:
            self._finish(head)
            asking.ended()

    def _finish(self, head: AnswerHead) -> None:
        """The answer is complete: the connection is free, unless it must close."""
        self._asking = self._head = self._chunks = None
        if head.is_last or not self._is_whole:
            self.transport.abort()
        else:
            if self._is_paused:
                self.resume()  # its last reader was slow
            self._pool.give_back(self)

    def _judge(self) -> None:
        if self.is_lost:
            return
        refused: Exception | None = None
        opened = self.transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):
            if opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSED:
                refused = ConnectionResetError("the request was not read")
        self.connection_lost(refused)
        self.transport.abort()

    def _break(self, reason: str) -> None:
        asking, self._asking = self._asking, None
        self.transport.abort()
        if asking is not None:
            asking.lost(reason, is_refused=False)


class HttpPool:
    """The connections to one replica. Event loop thread only."""

    def __init__(self, address: Address, loop: asyncio.AbstractEventLoop, poller: Poller, arena: Arena) -> None:
        self.loop = loop
        self.arena = arena
        self._address = address
        self._poller = poller
        self._tls: ssl.SSLContext | None = None if address.tls is None else address.tls.context("http/1.1")
        # The one that was used last is at the end.
        self._idle: deque[HttpUpstream] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._heads = Memory[bytes, AnswerHead](_MAX_HEADS, is_on=True)

    def take(self) -> HttpUpstream | None:
        """An idle connection, if there is one."""
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.transport.is_closing():
                return upstream
        return None

    def give_back(self, upstream: HttpUpstream) -> None:
        """The connection is idle."""
        upstream.idle_since_s = self.loop.time()
        self._idle.append(upstream)

    def forget(self, upstream: HttpUpstream) -> None:
        """The connection is lost."""
        with suppress(ValueError):
            self._idle.remove(upstream)

    def connect(self, asking: Asking) -> asyncio.Task[None]:
        """Open a connection for a request, which may cancel this."""
        task = self.loop.create_task(self._connect(asking), name=f"connect to {self._address}")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    def read_head(self, raw: bytes) -> AnswerHead:
        """Raises MalformedAnswerError."""
        head = self._heads.known.get(raw)
        if head is None:
            head = AnswerHead(raw)
            self._heads.remember(raw, head)
        return head

    def sweep(self, now_s: float) -> None:
        """Called about once a second: close connections that were idle for long."""
        while self._idle and now_s - self._idle[0].idle_since_s > IDLE_S:
            self._idle.popleft().close()

    def close(self) -> None:
        """Close idle connections; the others close when their answers are complete."""
        while self._idle:
            self._idle.pop().close()

    async def stop(self) -> None:
        """Close idle connections, and open none any more."""
        self.close()
        connecting = list(self._connecting)
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)

    async def _connect(self, asking: Asking) -> None:
        upstream = HttpUpstream(self)
        try:
            await open_connection(self.loop, self._poller, self._address, self._tls, upstream)
        except UnavailableError as error:
            asking.unreachable(error.message)
        else:
            asking.connected(upstream)


async def open_connection(
    loop: asyncio.AbstractEventLoop,
    poller: Poller,
    address: Address,
    tls: ssl.SSLContext | None,
    protocol: asyncio.BufferedProtocol,
) -> None:
    """Open a connection for `protocol`. Raises UnavailableError."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            opened = await _open_socket(loop, address)
            if tls is not None:
                try:
                    await loop.create_connection(lambda: protocol, sock=opened, ssl=tls, server_hostname=address.host)
                except BaseException:
                    opened.close()
                    raise
                return
    except TimeoutError:
        raise UnavailableError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
    except ssl.SSLError as error:
        raise UnavailableError(f"no TLS: {error}") from None
    except OSError as error:
        raise UnavailableError(f"cannot connect: {error.strerror or error}") from None
    SocketTransport(loop, poller, opened).begin(protocol)


async def _open_socket(loop: asyncio.AbstractEventLoop, address: Address) -> socket.socket:
    """A connected socket. Raises OSError."""
    failure: OSError = OSError("the name has no address")
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in found:
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _watch_for_silence(opened)
            await loop.sock_connect(opened, place)
        except OSError as error:
            opened.close()
            failure = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise failure


def _watch_for_silence(opened: socket.socket) -> None:
    """Have the system end the connection when the peer's machine is gone, idle or not."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", _SILENT_S)):
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
