"""One HTTP/1.1 connection on asyncio: httptools parses, the frontend answers from its callbacks.

Requests are answered one at a time in the order in which they came; what a client pipelines waits. There
is no Task and no Future per request, and an answer leaves in one write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import httptools

from modelserver.core.tensor import Buffer
from modelserver.frontends.http.exchange import Frontend, HttpExchange, HttpHead, HttpResponse
from modelserver.frontends.http.status import error_response, message_response
from modelserver.wire.body import BodyCollector
from modelserver.wire.http1.head import Headers, answer_head, content_length, json_length, split_target
from modelserver.wire.listener import MAX_HEAD_BYTES, HttpOptions

_MAX_PIPELINED = 32  # requests that wait for their turn before the connection is read no further
_MAX_JOINED_BYTES = 32 * 1024  # below this one write is cheaper than avoiding a copy


class _Incoming:
    """A request while it is received and while it waits for its turn."""

    __slots__ = (
        "body",
        "expects_continue",
        "headers",
        "is_head",
        "is_http_1_0",
        "is_taken",
        "keeps_alive",
        "method",
        "target",
    )

    def __init__(self) -> None:
        self.target = b""
        self.headers: dict[str, str] = {}
        self.method = ""
        self.keeps_alive = True
        self.is_head = False
        self.is_http_1_0 = False
        self.expects_continue = False  # and was not yet told to go on
        self.is_taken = False
        self.body: BodyCollector | None = None  # known once the head is complete


class Http1Connection(asyncio.Protocol):
    """From accept to close. Everything is called on the event loop thread.

    `_incoming` is the request that is being received, `_waiting` are received and not begun, `_turn` is the
    one that is being answered. `quiet_since_s` is when something last arrived or an answer last ended.
    """

    def __init__(
        self,
        frontend: Frontend,
        options: HttpOptions,
        connections: set[Http1Connection],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.closed: asyncio.Future[None] = loop.create_future()
        self.quiet_since_s = loop.time()
        self._frontend = frontend
        self._options = options
        self._connections = connections
        self._now_s = loop.time
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._incoming: _Incoming | None = None
        self._head_bytes = 0
        self._waiting: deque[_Incoming] = deque()
        self._turn: _Turn | None = None
        self._takes_requests = True
        self._is_draining = False
        self._is_reading = True
        self._room: asyncio.Future[None] | None = None  # pending while the client does not read

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._connections.discard(self)
        self._waiting.clear()
        self._incoming = None
        turn, self._turn = self._turn, None
        self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(None)
        if turn is not None:
            turn.lost()

    def data_received(self, data: bytes) -> None:
        self.quiet_since_s = self._now_s()
        if self._incoming is None and (self._is_draining or not self._takes_requests):
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # An offer that we do not take: the request is answered as HTTP/1.1, and what follows is not read.
            return
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not valid HTTP/1.1: {error}")
            return
        if self._incoming is not None and self._incoming.body is None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request line and headers are over the limit of {MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> None:
        """A client that has finished sending has left: the transport closes."""

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()
        self._set_reading(False)  # who does not read answers gets no further requests read

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is None:
            return
        if not room.done():
            room.set_result(None)
        self._begin_next()

    # Called by the parser, within `data_received`.

    def on_message_begin(self) -> None:
        self._incoming = _Incoming()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        incoming = self._incoming
        assert incoming is not None, "the parser began a message"
        incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        incoming = self._incoming
        assert incoming is not None, "the parser began a message"
        headers, key, text = incoming.headers, name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        incoming = self._incoming
        assert incoming is not None, "the parser began a message"
        parser, headers = self._parser, incoming.headers
        incoming.method = parser.get_method().decode("latin-1")
        incoming.is_head = incoming.method == "HEAD"
        incoming.keeps_alive = parser.should_keep_alive() and not parser.should_upgrade()
        incoming.is_http_1_0 = parser.get_http_version() == "1.0"
        incoming.body = BodyCollector(content_length(headers), json_length(headers), self._options.max_body_bytes)
        if "expect" in headers and headers["expect"].lower() == "100-continue":
            incoming.expects_continue = True
            if incoming.body.error is not None:
                # It asked first, and may not send the body at all: nobody knows where its next request begins.
                incoming.keeps_alive = False
                self._take(incoming)
            elif self._turn is None and not self._waiting:
                self._invite(incoming)
        elif incoming.body.error is not None:
            self._take_refused(incoming)

    def on_body(self, piece: bytes) -> None:
        incoming = self._incoming
        if incoming is None or incoming.body is None:
            return
        incoming.body.add(piece)
        if incoming.body.error is not None:
            self._take_refused(incoming)

    def on_message_complete(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is None or incoming.is_taken:
            return
        assert incoming.body is not None, "the head was complete before the message"
        incoming.body.finish()
        self._take(incoming)

    # Requests in their turn.

    def _take(self, incoming: _Incoming) -> None:
        """The request is complete, or refused before it is."""
        incoming.is_taken = True
        if not incoming.keeps_alive:
            self._takes_requests = False
        self._waiting.append(incoming)
        if self._turn is None:
            self._begin_next()
        elif len(self._waiting) >= _MAX_PIPELINED:
            self._set_reading(False)

    def _take_refused(self, incoming: _Incoming) -> None:
        """Answer a body over the limit at once; the rest of it is dropped as it comes, and the connection lives.

        A client that wants the connection closed hears at the end of its body: closed earlier, a reset
        could overtake the answer.
        """
        if incoming.keeps_alive and not incoming.is_taken:
            self._take(incoming)

    def _invite(self, incoming: _Incoming) -> None:
        """Tell a client that asked first to send its body."""
        incoming.expects_continue = False
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _begin_next(self) -> None:
        """Answer what waits, until an answer takes its time or the client does not read."""
        while self._waiting and self._turn is None and self._room is None and not self._transport.is_closing():
            self._begin(self._waiting.popleft())
        if self._room is None and len(self._waiting) < _MAX_PIPELINED:
            self._set_reading(True)
        incoming = self._incoming
        if incoming is not None and incoming.expects_continue and self._turn is None and not self._waiting:
            self._invite(incoming)

    def _set_reading(self, is_reading: bool) -> None:
        if is_reading == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _begin(self, incoming: _Incoming) -> None:
        turn = self._turn = _Turn(self, incoming)
        body = incoming.body
        assert body is not None, "a request has its turn after its head"
        if body.error is not None:
            turn.respond(error_response(body.error))
            return
        path, query = split_target(incoming.target)
        turn.head = HttpHead(incoming.method, path, incoming.headers, query)
        turn.body = body.body()
        self._frontend.handle(turn)

    def end_turn(self, *, is_last: bool) -> None:
        """The answer is written."""
        self._turn = None
        self.quiet_since_s = self._now_s()
        if is_last:
            self._transport.close()
        elif self._waiting or self._incoming is not None:
            self._begin_next()

    # Called by the turn.

    def write(self, *buffers: Buffer) -> None:
        """Send buffers together, without joining large ones."""
        if sum(map(len, buffers)) <= _MAX_JOINED_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            # Not `writelines`: asyncio's forgets the back-pressure from Python 3.12 on, and joins before it.
            for buffer in buffers:
                self._transport.write(buffer)

    async def room(self) -> None:
        """Wait until the client has read enough for more to be sent."""
        if self._room is not None:
            await asyncio.shield(self._room)

    @property
    def is_stopping(self) -> bool:
        """Whether the answer in progress is the last one."""
        takes_more = self._takes_requests and not (self._is_draining and self._incoming is None)
        return not takes_more and not self._waiting

    # Called by the listener.

    @property
    def is_idle(self) -> bool:
        """Nothing is being received or answered."""
        return self._incoming is None and self._turn is None and not self._waiting

    def check_patience(self, now_s: float) -> None:
        """Close a connection that is idle for too long, or pauses in the middle of a request."""
        quiet_s = now_s - self.quiet_since_s
        if self.is_idle:
            if quiet_s > self._options.keep_alive_s:
                self._transport.close()
        elif self._turn is None and quiet_s > self._options.receive_timeout_s:
            self._refuse(408, f"the request did not go on for {self._options.receive_timeout_s:g} s")

    def shutdown(self) -> None:
        """Take no further request; close once the ones that came are answered."""
        self._is_draining = True
        if self.is_idle:
            self._transport.close()

    def abort(self) -> None:
        """Close now, whatever is in progress."""
        self._transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, behind the answers that are due, and close."""
        refused = _Incoming()
        refused.keeps_alive = False
        self._incoming = None
        self._takes_requests = False
        if self._turn is not None or self._waiting:
            # Earlier requests are still owed their answers; this one learns by the close that follows them.
            return
        _Turn(self, refused).respond(message_response(status, message))


class _Turn(HttpExchange):
    """The one way to answer a request; also the writer of an answer that is sent in pieces."""

    __slots__ = ("_connection", "_incoming", "_is_chunked")

    def __init__(self, connection: Http1Connection, incoming: _Incoming) -> None:
        self.on_disconnect = None
        self._connection: Http1Connection | None = connection
        self._incoming = incoming
        self._is_chunked = False

    def respond(self, response: HttpResponse) -> None:
        """Answer completely; nothing happens when the client has left or the answer was given."""
        connection = self._connection
        if connection is None:
            return
        is_last = self._is_last(connection)
        framing = f"Content-Length: {sum(map(len, response.body))}\r\n"
        head = self._head(response.status, response.headers, framing, is_last=is_last)
        if self._incoming.is_head:
            connection.write(head)
        else:
            connection.write(head, *response.body)
        self._end(connection, is_last=is_last)

    def start(self, status: int, headers: Headers) -> _Turn:
        """Begin an answer in pieces: chunked, or up to the close for a client that knows no chunks."""
        connection = self._connection
        if connection is not None:
            self._is_chunked = not self._incoming.is_http_1_0
            if not self._is_chunked:
                self._incoming.keeps_alive = False
            framing = "Transfer-Encoding: chunked\r\n" if self._is_chunked else ""
            is_last = self._is_last(connection)
            connection.write(self._head(status, headers, framing, is_last=is_last))
        return self

    async def write(self, data: Buffer) -> None:
        """Send a piece; returns when there is room for more. Raises ConnectionResetError when the client has left."""
        connection = self._connection
        if connection is None:
            raise ConnectionResetError("the client has left")
        if data and not self._incoming.is_head:
            if self._is_chunked:
                connection.write(b"%x\r\n" % len(data), data, b"\r\n")
            else:
                connection.write(data)
        await connection.room()

    async def close(self) -> None:
        """End an answer in pieces."""
        connection = self._connection
        if connection is None:
            return
        if self._is_chunked and not self._incoming.is_head:
            connection.write(b"0\r\n\r\n")
        self._end(connection, is_last=self._is_last(connection))

    def lost(self) -> None:
        """The client has left before its answer was complete."""
        self._connection = None
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()

    def _head(self, status: int, headers: Headers, framing: str, *, is_last: bool) -> bytes:
        if is_last:
            framing += "Connection: close\r\n"
        elif self._incoming.is_http_1_0:
            framing += "Connection: keep-alive\r\n"
        return answer_head(status, headers, framing)

    def _is_last(self, connection: Http1Connection) -> bool:
        return not self._incoming.keeps_alive or connection.is_stopping

    def _end(self, connection: Http1Connection, *, is_last: bool) -> None:
        # What the handler hung on this turn may refer to it: without the cut it would wait for the collector.
        self._connection = self.on_disconnect = None
        connection.end_turn(is_last=is_last)
