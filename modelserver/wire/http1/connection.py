"""One HTTP/1.1 connection on asyncio: the order of its answers, how it ends, and how long it waits for its peer.

Requests are answered one at a time in the order of their arrival; pipelined requests wait. There is no Task and no
Future per request, and all answers of one read leave in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from modelserver.core.tensor import Buffer
from modelserver.protocol.response import HttpResponse, message_response
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.address import peer_of
from modelserver.wire.assembly import owner_of
from modelserver.wire.context import DISMISSAL, FIRST_WORDS_S, WireContext, cut
from modelserver.wire.http1.exchange import Answering
from modelserver.wire.http1.head import (
    BODYLESS,
    CLOSE,
    CONTINUE,
    LENGTH,
    LENGTH_AND_CLOSE,
    LENGTH_AND_KEEP_ALIVE,
    NO_LENGTH,
    RequestHead,
    answer_start,
)
from modelserver.wire.http1.incoming_body import Incoming
from modelserver.wire.http1.outgoing import Outgoing
from modelserver.wire.http1.pieces import PieceSink, PieceWriter
from modelserver.wire.http1.reader import RequestReader
from modelserver.wire.sockets.transport import receive_soon_of


class Http1Connection(RequestReader, Answering, PieceSink):
    """Everything is called on the event loop thread; `begin` first."""

    __slots__ = (
        "_is_finished",
        "_is_last",
        "_is_lost",
        "_is_reading",
        "_known_head",
        "_known_headers",
        "_known_num_bytes",
        "_known_start",
        "_pieces",
        "_quiet_since_s",
        "_since_s",
        "_transport",
    )

    def __init__(self, context: WireContext) -> None:
        super().__init__(context)
        self._pieces: PieceWriter | None = None  # of the exchange, when its answer is sent in pieces
        self._is_last = False  # that answer
        self._is_finished = self._is_lost = False
        self._is_reading = True
        # The beginning of the last plain answer: usually the next one has the same headers, often the same size.
        self._known_headers: Sequence[tuple[str, str]] | None = None
        self._known_num_bytes = -1
        self._known_start = self._known_head = b""

    def begin(self, transport: asyncio.Transport, data: bytes) -> None:
        """Called once, in place of `connection_made`, with the bytes already read."""
        context = self._context
        self._transport = transport
        self._outgoing = Outgoing(transport, context.outbox, context.bulk)
        self._receive_soon = receive_soon_of(transport)
        transport.set_write_buffer_limits(high=context.limits.write_buffer_bytes)
        context.connections.add(self)
        context.counts.opened(Protocol.HTTP1)
        self._is_draining = context.is_draining or context.is_retiring
        self._since_s = self._quiet_since_s = context.loop.time()
        self._head_since_s = self._since_s
        if data:
            self._receive(data)
        elif context.is_draining:
            self.shutdown()
        elif not context.is_retiring:
            self._settle()

    @property
    def peer(self) -> str:
        """The address of the client."""
        return peer_of(self._transport)

    # Called by the transport.

    def eof_received(self) -> None:
        """A client that has finished sending has left: the transport closes, after the pending data."""
        self.flush()

    def pause_writing(self) -> None:
        self._outgoing.pause()
        self._set_reading()  # while a client does not read answers, its requests are not read

    def resume_writing(self) -> None:
        self._outgoing.resume()
        self._advance()

    def connection_lost(self, _error: Exception | None) -> None:
        self._is_lost = self._is_over = True
        self._context.connections.discard(self)
        self._context.counts.closed(Protocol.HTTP1)
        if self._num_dropped:
            self._context.refused_peers.dropped(owner_of("", self.peer), self._num_dropped)
        if self._incoming is not None:
            self._incoming.collector.drop()
        lost = [self._exchange, *self._waiting]
        pieces = self._pieces
        self._incoming = self._room = self._exchange = self._pieces = None
        self._waiting = []
        self._is_held = False
        self._rest = b""
        if pieces is not None:
            pieces.lost()
        self._outgoing.close()
        for exchange in lost:
            if exchange is not None:
                exchange.lost()

    # Requests in their turn.

    def _advance(self) -> None:
        """Continue after an answer: begin waiting requests, read held data."""
        self._outgoing.is_collecting = True
        self._begin_waiting()
        if self._is_held and self._exchange is None and not self._waiting and not self._outgoing.is_paused:
            self._is_held = False
            rest, self._rest = self._rest, b""
            self._go_through(rest)
        self._settle()

    def _settle(self) -> None:
        """The end of everything that begins with a read or an answer: send, and wait for the right thing."""
        outgoing = self._outgoing
        outgoing.is_collecting = False
        if self._exchange is None and not self._waiting:
            if self._is_held and not outgoing.is_paused:
                self._context.loop.call_soon(self._go_on_reading)
            incoming = self._incoming
            if incoming is not None and not incoming.is_invited:
                incoming.is_invited = True
                outgoing.add(CONTINUE, (), 0)
            if self._refusal is not None and not self._is_put_off:
                self._answer_refusal(self._refusal)
            elif self._is_draining and self._is_idle():
                self._finish()
        if self._is_held or self._num_dropped or self._is_put_off or not self._is_reading or self._is_body_held():
            self._set_reading()
        outgoing.flush()

    def _go_on_reading(self) -> None:
        """Other connections had their turn."""
        if self._is_held and not self._is_lost:
            self._advance()

    def _set_reading(self) -> None:
        """Read, unless enough requests wait."""
        is_full = self._is_held or self._is_put_off or self._num_dropped > self._max_dropped or self._is_body_held()
        is_reading = not (self._outgoing.is_paused or is_full)
        if is_reading == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = is_reading
        if not is_reading:
            self._transport.pause_reading()
            return
        if self._head_since_s is not None:
            self._head_since_s = self._context.loop.time()
        self._transport.resume_reading()

    def _is_body_held(self) -> bool:
        """Whether the body that is being received waits for room where it goes."""
        return self._incoming is not None and not self._incoming.collector.has_room

    # Answers, called by the exchange and its writer.

    def answer(self, request: RequestHead, response: HttpResponse) -> None:
        """Send the whole answer to the request whose turn it is."""
        body = response.body
        num_bytes = 0
        for buffer in body:
            num_bytes += len(buffer)
        if request.has_plain_answer and response.status == 200 and not self._is_draining:
            outgoing = self._outgoing
            outgoing.add(self._plain_head(response.headers, num_bytes), body, num_bytes)
            self._exchange = None
            if not (outgoing.is_collecting or outgoing.is_lone) and self._has_work():
                self._advance()
            return
        start = answer_start(response.status, tuple(response.headers))
        is_last = not request.keeps_alive or (self._is_draining and self._has_no_more())
        if is_last:
            head = start + LENGTH_AND_CLOSE % num_bytes
        elif request.is_http_1_0:
            head = start + LENGTH_AND_KEEP_ALIVE % num_bytes
        else:
            head = start + LENGTH % num_bytes
        if request.is_head or response.status in BODYLESS:
            if response.status in BODYLESS:
                head = start + (CLOSE if is_last else NO_LENGTH)
            body, num_bytes = (), 0
        self._outgoing.add(head, body, num_bytes)
        self._exchange = None
        if is_last:
            self._finish(lingers=True)
        elif not self._outgoing.is_collecting and self._has_work():
            self._advance()

    def _plain_head(self, headers: Sequence[tuple[str, str]], num_bytes: int) -> bytes:
        """The head of an answer with status 200 and a body of that many bytes, after which the connection continues."""
        if headers is not self._known_headers:
            # Only immutable objects are recognised.
            self._known_headers = headers if isinstance(headers, tuple) else None
            self._known_start = answer_start(200, tuple(headers))
            self._known_num_bytes = -1
        if num_bytes != self._known_num_bytes:
            self._known_num_bytes = num_bytes
            self._known_head = self._known_start + LENGTH % num_bytes
        return self._known_head

    def begin_pieces(self, request: RequestHead, status: int, headers: list[tuple[str, str]]) -> PieceWriter:
        """Send the head of the answer to the request whose turn it is."""
        has_length = any(name.lower() == "content-length" for name, _ in headers)
        is_chunked = not request.is_http_1_0 and not has_length
        ends_itself = is_chunked or has_length
        self._is_last = not request.keeps_alive or not ends_itself or (self._is_draining and self._has_no_more())
        framing = b"Transfer-Encoding: chunked\r\n" if is_chunked else b""
        end = CLOSE if self._is_last else NO_LENGTH
        self._transport.set_write_buffer_limits(high=self._context.limits.pieces_buffer_bytes)
        self._outgoing.add(answer_start(status, tuple(headers)) + framing + end, (), 0)
        self._pieces = PieceWriter(self, headers, is_chunked=is_chunked, is_silent=request.is_head)
        return self._pieces

    @property
    def has_room(self) -> bool:
        """Whether the client has read enough for more to be sent."""
        return self._outgoing.has_room

    async def room(self) -> None:
        """Wait until the client has read enough for more to be sent, or has left."""
        if not self._outgoing.has_room:
            await self._outgoing.room()

    def send_piece(self, buffers: Sequence[Buffer]) -> bool:
        """Send these buffers soon; as `has_room` afterwards."""
        outgoing = self._outgoing
        outgoing.add(b"", buffers, sum(map(len, buffers)))
        return outgoing.has_room

    def end_pieces(self) -> None:
        """The answer is complete."""
        assert self._exchange is not None, "only the exchange in turn answers"
        self._exchange.ended()
        self._exchange = self._pieces = None
        self._transport.set_write_buffer_limits(high=self._context.limits.write_buffer_bytes)
        if self._is_last:
            self._finish(lingers=True)
        elif not self._outgoing.is_collecting:
            self._advance()

    def flush(self) -> None:
        """Send the collected data."""
        self._outgoing.flush()

    def _has_no_more(self) -> bool:
        has_none = not self._waiting and self._incoming is None and self._refusal is None
        return has_none and self._rest in (b"", b"\r\n")

    def _has_work(self) -> bool:
        """Whether the end of an answer lets other work continue."""
        incoming = self._incoming
        is_asked = incoming is not None and not incoming.is_invited
        return bool(self._waiting) or self._is_held or self._refusal is not None or is_asked

    def _is_idle(self) -> bool:
        return self._exchange is None and self._has_no_more()

    def _answer_refusal(self, response: HttpResponse) -> None:
        self._refusal = None
        body = response.body
        num_bytes = sum(map(len, body))
        head = answer_start(response.status, tuple(response.headers)) + LENGTH_AND_CLOSE % num_bytes
        self._outgoing.add(head, body, num_bytes)
        self._finish(lingers=True)

    def _finish(self, *, lingers: bool = False) -> None:
        """Close after the last answer; with `lingers` the peer gets time to read it."""
        if self._is_finished or self._is_lost:
            return
        self._is_finished = self._is_over = True
        self._quiet_since_s = self._context.loop.time()
        self._progress.restart()
        self._outgoing.flush()
        if lingers:
            self._transport.write_eof()
        else:
            self._transport.close()

    # Called by the port.

    def sweep(self, now_s: float) -> None:
        """Called about once a second: close the connection if its time is up."""
        if self._is_lost:
            return
        times = self._context.limits.times
        if self._outgoing.stalled_s(now_s) > times.slow_reader_s:
            self._context.counts.violated(Protocol.HTTP1, Violation.SLOW_READER)
            cut(self._transport, self._context)
        elif self._is_finished:
            self._check_end(now_s)
        elif self._exchange is not None or self._waiting or self._is_body_held():
            # It waits for us.
            self._is_quiet = False
            self._progress.restart()
            if self._pieces is not None:
                self._pieces.keep_open(now_s, times.sse_comment_s)
        elif self._incoming is not None:
            self._check_body(self._incoming, now_s)
        elif self._head_since_s is not None and self._rest != b"\r\n":
            self._check_head(now_s - self._head_since_s)
        else:
            self._check_idle(now_s)
        self._check_age(now_s)

    def _check_end(self, now_s: float) -> None:
        """Everything was answered; give the peer time to read it, and drop what it still sends."""
        times = self._context.limits.times
        if self._transport.get_write_buffer_size():
            return
        pause_s = self._progress.paused_s(now_s, self._num_dropped)
        if pause_s > times.linger_s or now_s - self._quiet_since_s > times.body_pause_s:
            self._transport.abort()

    def _check_body(self, incoming: Incoming, now_s: float) -> None:
        times = self._context.limits.times
        if self._progress.is_too_slow(now_s, incoming.num_bytes, times):
            message = f"the request's body came too slowly: at most {times.body_pause_s:g} s without a byte, and "
            text = f"{message}{times.body_rate} bytes a second"
            errors = self._frontend.errors(incoming.request.http.path)
            self._refuse(errors.refused(408, text), Violation.SLOW_BODY)
            self._settle()

    def _check_head(self, age_s: float) -> None:
        limit_s = self._context.limits.times.head_s
        if age_s <= limit_s:
            return
        if self._rest:
            message = f"the request's headers were not complete within {limit_s:g} s"
            self._refuse(message_response(408, message), Violation.SLOW_HEAD)
            self._settle()
        else:
            self._context.counts.violated(Protocol.HTTP1, Violation.SLOW_HEAD)
            self._finish()

    def _check_idle(self, now_s: float) -> None:
        if not self._is_quiet:
            self._is_quiet, self._quiet_since_s = True, now_s
            return
        if self._last_head is not None:
            self._forget_heads()
        if now_s - self._quiet_since_s > self._context.limits.times.http1_idle_s:
            self._finish()

    def _check_age(self, now_s: float) -> None:
        max_age_s = self._context.limits.keepalive.max_age_s
        if max_age_s is None or now_s - self._since_s <= max_age_s:
            return
        grace_s = self._context.limits.keepalive.max_age_grace_s
        if not self._is_draining:
            # The next answer says that it is the last. Closed while idle, a request could be on its way already.
            self._is_draining = True
        elif grace_s is not None and now_s - self._since_s > max_age_s + grace_s:
            self._transport.abort()

    def retire(self) -> None:
        """Make the next answer the last. Closed while idle, a request could be on its way already."""
        self._is_draining = True

    def shutdown(self) -> None:
        """Take no further request; close once the received ones are answered. Safe to repeat."""
        self._is_draining = True
        if self._is_idle():
            # A request may be on its way: a busy client sends one within this time, and learns from its answer.
            self._context.loop.call_later(FIRST_WORDS_S, self._finish_if_idle)

    def _finish_if_idle(self) -> None:
        if not self._is_lost and self._is_idle():
            self._finish()

    def dismiss(self) -> None:
        """Answer the request whose turn it is, or that is being received, with 503; the others are lost."""
        exchange, lost = self._exchange, self._waiting
        if (
            self._is_finished
            or self._is_lost
            or self._pieces is not None
            or (exchange is None and self._incoming is None)
        ):
            self._transport.abort()  # an answer that has begun cannot say it any more; its missing end does
            return
        path = exchange.head.path if exchange is not None else ""
        if self._incoming is not None:
            path = path or self._incoming.request.http.path
            self._incoming.collector.drop()
        self._incoming = self._room = self._refusal = None
        self._waiting, self._rest = [], b""
        self._is_held, self._is_over = False, True
        response = self._frontend.errors(path).refused(503, DISMISSAL, "unavailable")
        if exchange is None:
            self._answer_refusal(response)
        else:
            on_disconnect = exchange.on_disconnect
            exchange.respond(response)
            if on_disconnect is not None:
                on_disconnect()
        for each in lost:
            each.lost()
        self.flush()

    def abort(self) -> None:
        """Close now, regardless of work in progress."""
        self._transport.abort()
