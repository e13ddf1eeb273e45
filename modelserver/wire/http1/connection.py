"""One HTTP/1.1 connection on asyncio, from its first bytes to its close.

Requests are answered one at a time in the order in which they came; what a client pipelines waits. There is
no Task and no Future per request. Heads that repeat are not parsed again, large bodies are received into
their own memory, and all answers of one read leave in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from modelserver.core.tensor import Buffer
from modelserver.errors import PayloadTooLargeError, ServerError
from modelserver.frontends.http.exchange import Frontend, HttpExchange, HttpResponse
from modelserver.frontends.http.status import error_response, message_response
from modelserver.telemetry.wire import Protocol, Violation
from modelserver.wire.body import MIN_DIRECT_BYTES
from modelserver.wire.context import WireContext
from modelserver.wire.http1.answer import (
    BODYLESS,
    CLOSE,
    CONTINUE,
    LENGTH,
    LENGTH_AND_CLOSE,
    LENGTH_AND_KEEP_ALIVE,
    NO_LENGTH,
    answer_start,
)
from modelserver.wire.http1.head import END_OF_HEAD, RefusedError, RequestHead, check_beginning
from modelserver.wire.http1.incoming import Incoming
from modelserver.wire.http1.memo import HeadMemo
from modelserver.wire.http1.outgoing import Outgoing
from modelserver.wire.http1.patience import Progress
from modelserver.wire.http1.pieces import PieceWriter
from modelserver.wire.http1.turn import Turn

# Bodies of requests that wait for their turn before the connection is read no further.
_MAX_WAITING_BYTES = 1024 * 1024
# Requests that one connection begins before others have their turn.
_MAX_NEW_PER_READ = 128
# Of what a refused client still sends: a close with unread bytes could overtake the answer on its way. Many
# clients send all of a body before they read; one that is too large is dropped up to the size of a permitted one.
_MAX_DROPPED_BYTES = 64 * 1024
_NO_HTTP = "this port serves gRPC only, which needs HTTP/2"


class Http1Connection(asyncio.BufferedProtocol):
    """Everything is called on the event loop thread; `begin` first.

    What came goes through these in order: `_rest` are bytes of a head that is not complete, or of requests
    that are not read yet because enough others wait (`_is_held`). `_incoming` is the request whose body is
    being received. `_waiting` are complete, `_turn` is being answered. `_refusal` is the answer to what was no
    request, which is the last one. When `_is_over`, no more requests are read.
    """

    __slots__ = (
        "_arena",
        "_context",
        "_frontend",
        "_head_since_s",
        "_incoming",
        "_is_draining",
        "_is_finished",
        "_is_held",
        "_is_last",
        "_is_lost",
        "_is_over",
        "_is_quiet",
        "_is_reading",
        "_last_data",
        "_last_head",
        "_max_dropped",
        "_memo",
        "_num_dropped",
        "_outgoing",
        "_pieces",
        "_progress",
        "_quiet_since_s",
        "_refusal",
        "_rest",
        "_room",
        "_since_s",
        "_transport",
        "_turn",
        "_waiting",
    )

    def __init__(self, context: WireContext) -> None:
        self._context = context
        self._frontend: Frontend = context.http or _NoFrontend()
        self._arena = context.arena.view
        self._memo = HeadMemo(context.limits)
        # The head that came last: mostly the next one is the same.
        self._last_data = b""
        self._last_head: RequestHead | None = None
        self._rest = b""
        self._incoming: Incoming | None = None
        self._room: memoryview | None = None  # where the body of `_incoming` goes directly
        self._waiting: list[Turn] = []
        self._turn: Turn | None = None
        self._pieces: PieceWriter | None = None  # of the turn, when its answer is sent in pieces
        self._refusal: HttpResponse | None = None
        self._num_dropped = 0
        self._max_dropped = _MAX_DROPPED_BYTES
        self._is_held = self._is_over = self._is_draining = self._is_last = False
        self._is_finished = self._is_lost = self._is_quiet = False
        self._is_reading = True
        self._progress = Progress()

    def begin(self, transport: asyncio.Transport, data: bytes) -> None:
        """Called once, in place of `connection_made`, with what was read already."""
        context = self._context
        self._transport = transport
        self._outgoing = Outgoing(transport, context.outbox)
        transport.set_write_buffer_limits(high=context.limits.write_buffer_bytes)
        context.connections.add(self)
        context.counts.opened(Protocol.HTTP1)
        self._is_draining = context.is_draining
        self._since_s = self._quiet_since_s = context.loop.time()
        # When the head that is awaited began; None while none is: the first one is from the start.
        self._head_since_s: float | None = self._since_s
        self._receive(data)

    # Called by the transport.

    def get_buffer(self, _sizehint: int) -> memoryview:
        room = self._room
        return self._arena if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        self._is_quiet = False
        if self._room is not None:
            self._fill(nbytes)
        elif nbytes >= MIN_DIRECT_BYTES:
            self._receive_large(nbytes)
        else:
            self._receive(self._arena[:nbytes].tobytes())

    def eof_received(self) -> None:
        """A client that has finished sending has left: the transport closes, behind what is to be sent."""
        self.flush()

    def pause_writing(self) -> None:
        self._outgoing.pause()
        self._set_reading()  # who does not read answers gets no further requests read

    def resume_writing(self) -> None:
        self._outgoing.resume()
        self._advance()

    def connection_lost(self, _error: Exception | None) -> None:
        self._is_lost = self._is_over = True
        self._context.connections.discard(self)
        self._context.counts.closed(Protocol.HTTP1)
        if self._incoming is not None:
            self._incoming.collector.drop()
        lost = [self._turn, *self._waiting]
        pieces = self._pieces
        self._incoming = self._room = self._turn = self._pieces = None
        self._waiting = []
        self._rest = b""
        if pieces is not None:
            pieces.lost()
        self._outgoing.close()
        for turn in lost:
            if turn is not None:
                turn.lost()

    # Receiving.

    def _receive(self, data: bytes) -> None:
        """Read what came."""
        self._outgoing.is_collecting = True
        at = self._feed(data, 0) if self._incoming is not None else 0
        if self._is_over:
            self._num_dropped += len(data) - at
        elif self._is_held:
            self._rest += data
        else:
            self._read(self._rest + data if self._rest else data, at)
        self._settle()

    def _read(self, data: bytes, at: int) -> None:
        """Begin, or let wait, the requests in `data` from `at` on; what is incomplete becomes `_rest`.

        One function, because this is what a small request costs.
        """
        size, start, num_left = len(data), at, _MAX_NEW_PER_READ
        outgoing = self._outgoing
        while at < size and not self._is_over:
            if num_left == 0 or (self._waiting and self._is_queue_full()):
                self._is_held = True
                break
            request = self._last_head
            if request is not None and data.startswith(self._last_data, at):
                body_at = at + len(self._last_data)
            else:
                body_at = self._read_head(data, at)
                if body_at == 0:
                    break
                request = self._last_head
                assert request is not None, "a head was read"
            num_left -= 1
            at = body_at + request.content_length
            if not request.keeps_alive:
                self._is_over = True
            if self._is_draining:
                self._rest = data[at:]  # tells whether this is the last one
            if at > size or not request.has_plain_body:
                at = self._begin_body(request, data, body_at)
                continue
            turn = Turn(self, request, data[body_at:at])
            if self._turn is None and not self._waiting and not outgoing.is_paused:
                self._turn = turn
                self._frontend.handle(turn)
            else:
                self._waiting.append(turn)
        if at >= size or self._is_over:
            self._rest = b""
            self._head_since_s = None
        else:
            self._rest = data[at:]
            if at > start or self._head_since_s is None:
                self._head_since_s = self._context.loop.time()

    def _read_head(self, data: bytes, at: int) -> int:
        """Make the head at `at` the last one; returns where it ends, 0 if it does not, or if it is refused."""
        limits = self._context.limits
        # The search begins behind an empty line before the head.
        end = data.find(END_OF_HEAD, at + 2) + len(END_OF_HEAD)
        try:
            if end < len(END_OF_HEAD):
                check_beginning(data[at : at + limits.head.max_http1_bytes + 1], limits.head)
                return 0
            head_data = data[at:end]
            self._last_head = self._memo.get(head_data)
        except RefusedError as refused:
            self._refuse(message_response(refused.status, refused.message), refused.violation)
            return 0
        self._last_data = head_data
        return end

    def _begin_body(self, request: RequestHead, data: bytes, at: int) -> int:
        """The body is not complete, or not plain. Returns where it ends in `data`."""
        self._incoming = Incoming(request, self._context.limits.max_body_bytes, self._context.assembly)
        self._progress.restart()
        return self._feed(data, at)

    def _feed(self, data: bytes, at: int) -> int:
        """Give the body that is being received what is its own; returns where it ends in `data`."""
        incoming = self._incoming
        assert incoming is not None, "a body is being received"
        try:
            if incoming.collector.error is None:
                at = incoming.feed(data, at)
        except RefusedError as refused:
            self._refuse(message_response(refused.status, refused.message), refused.violation)
            return len(data)
        self._go_on(incoming)
        return len(data) if self._refusal is not None else at

    def _fill(self, nbytes: int) -> None:
        """So many bytes of a body were received where they belong."""
        incoming = self._incoming
        assert incoming is not None, "a body is being received"
        self._outgoing.is_collecting = True
        incoming.collector.filled(nbytes)
        self._go_on(incoming)
        self._settle()

    def _go_on(self, incoming: Incoming) -> None:
        """More of the body has come, perhaps all."""
        error = incoming.collector.error
        if error is not None:
            self._refuse_body(error)
        elif incoming.is_complete:
            self._incoming = self._room = None
            self._take(Turn(self, incoming.request, incoming.finish()))
        else:
            self._room = incoming.collector.room()

    def _receive_large(self, nbytes: int) -> None:
        """Read what came; if it begins with the head of a large body, that one is copied once only."""
        view, limit = self._arena, self._context.limits.head.max_http1_bytes
        if self._rest or self._incoming is not None or self._is_over or self._is_held:
            self._receive(view[:nbytes].tobytes())
            return
        end = self._context.arena.memory.find(END_OF_HEAD, 2, min(nbytes, limit)) + len(END_OF_HEAD)
        if end < len(END_OF_HEAD):
            self._receive(view[:nbytes].tobytes())
            return
        head_data = view[:end].tobytes()
        body_at = self._read_head(head_data, 0)
        request = self._last_head
        if body_at == 0 or request is None or request.is_chunked or request.content_length < MIN_DIRECT_BYTES:
            self._receive(view[:nbytes].tobytes())
            return
        self._is_over = not request.keeps_alive
        self._outgoing.is_collecting = True
        self._head_since_s = None
        body_end = min(body_at + request.content_length, nbytes)
        rest = self._rest = view[body_end:nbytes].tobytes()
        incoming = self._incoming = Incoming(request, self._context.limits.max_body_bytes, self._context.assembly)
        incoming.is_invited = True
        self._progress.restart()
        incoming.collector.add(view[body_at:body_end])
        self._go_on(incoming)
        self._rest = b""
        if self._is_over:
            self._num_dropped += len(rest)
        else:
            self._read(rest, 0)
        self._settle()

    # Requests in their turn.

    def _is_queue_full(self) -> bool:
        waiting = self._waiting
        return (
            len(waiting) >= self._context.limits.max_pipelined
            or sum([len(turn.body) for turn in waiting]) > _MAX_WAITING_BYTES
        )

    def _take(self, turn: Turn) -> None:
        """A request is complete."""
        self._waiting.append(turn)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._turn is None and not self._outgoing.is_paused and not self._is_lost:
            turn = self._turn = self._waiting.pop(0)
            self._frontend.handle(turn)

    def _advance(self) -> None:
        """Go on after an answer: begin what waits, read what was held."""
        self._outgoing.is_collecting = True
        self._begin_waiting()
        if self._is_held and self._turn is None and not self._waiting and not self._outgoing.is_paused:
            self._is_held = False
            rest, self._rest = self._rest, b""
            self._read(rest, 0)
        self._settle()

    def _settle(self) -> None:
        """The end of everything that begins with a read or an answer: send, and wait for the right thing."""
        outgoing = self._outgoing
        outgoing.is_collecting = False
        if self._turn is None and not self._waiting:
            if self._is_held and not outgoing.is_paused:
                self._context.loop.call_soon(self._go_on_reading)
            incoming = self._incoming
            if incoming is not None and not incoming.is_invited:
                incoming.is_invited = True
                outgoing.add(CONTINUE, (), 0)
            if self._refusal is not None:
                self._answer_refusal(self._refusal)
            elif self._is_draining and self._is_idle():
                self._finish()
        if self._is_held or self._num_dropped or not self._is_reading:
            self._set_reading()
        outgoing.flush()

    def _go_on_reading(self) -> None:
        """Other connections had their turn."""
        if self._is_held and not self._is_lost:
            self._advance()

    def _set_reading(self) -> None:
        """Read, unless there is enough to do."""
        is_reading = not (self._outgoing.is_paused or self._is_held or self._num_dropped > self._max_dropped)
        if is_reading == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = is_reading
        if not is_reading:
            self._transport.pause_reading()
            return
        if self._head_since_s is not None:
            self._head_since_s = self._context.loop.time()
        self._transport.resume_reading()

    # Answers, called by the turn and its writer.

    def answer(self, request: RequestHead, response: HttpResponse) -> None:
        """Send the whole answer to the request whose turn it is."""
        body = response.body
        num_bytes = len(body[0]) if len(body) == 1 else sum(map(len, body))
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
        self._turn = None
        if is_last:
            self._finish(lingers=request.keeps_alive)
        elif not self._outgoing.is_collecting and self._has_work():
            self._advance()

    def begin_pieces(self, request: RequestHead, status: int, headers: list[tuple[str, str]]) -> PieceWriter:
        """Send the head of the answer to the request whose turn it is."""
        is_chunked = not request.is_http_1_0
        self._is_last = not request.keeps_alive or not is_chunked or (self._is_draining and self._has_no_more())
        framing = b"Transfer-Encoding: chunked\r\n" if is_chunked else b""
        end = CLOSE if self._is_last else NO_LENGTH
        self._outgoing.add(answer_start(status, tuple(headers)) + framing + end, (), 0)
        self._pieces = PieceWriter(self, headers, is_chunked=is_chunked, is_silent=request.is_head)
        return self._pieces

    async def room(self) -> None:
        """Wait until the client has read enough for more to be sent, or has left."""
        if self._outgoing.is_paused:
            await self._outgoing.room()

    def send_piece(self, buffers: Sequence[Buffer]) -> None:
        """Send these buffers soon."""
        self._outgoing.add(b"", buffers, sum(map(len, buffers)))

    def end_pieces(self) -> None:
        """The answer is complete."""
        assert self._turn is not None, "who answers has its turn"
        self._turn.ended()
        self._turn = self._pieces = None
        if self._is_last:
            self._finish()
        elif not self._outgoing.is_collecting:
            self._advance()

    def flush(self) -> None:
        """Send what is collected."""
        self._outgoing.flush()

    def _has_no_more(self) -> bool:
        return not self._waiting and not self._rest and self._incoming is None and self._refusal is None

    def _has_work(self) -> bool:
        """Whether the end of an answer lets something else go on."""
        incoming = self._incoming
        is_asked = incoming is not None and not incoming.is_invited
        return bool(self._waiting) or self._is_held or self._refusal is not None or is_asked

    def _is_idle(self) -> bool:
        return self._turn is None and self._has_no_more()

    # What is no request.

    def _refuse(self, response: HttpResponse, violation: Violation) -> None:
        """Answer what is no request, behind the answers that are due, and close."""
        self._context.counts.violated(Protocol.HTTP1, violation)
        if self._incoming is not None:
            self._incoming.collector.drop()
        self._incoming = self._room = None
        self._rest = b""
        self._is_over = True
        self._is_held = False
        self._refusal = response

    def _refuse_body(self, error: ServerError) -> None:
        self._max_dropped = max(_MAX_DROPPED_BYTES, self._context.limits.max_body_bytes)
        is_too_large = isinstance(error, PayloadTooLargeError)
        self._refuse(error_response(error), Violation.BODY_TOO_LARGE if is_too_large else Violation.ASSEMBLY_BUDGET)

    def _answer_refusal(self, response: HttpResponse) -> None:
        self._refusal = None
        body = response.body
        num_bytes = sum(map(len, body))
        head = answer_start(response.status, tuple(response.headers)) + LENGTH_AND_CLOSE % num_bytes
        self._outgoing.add(head, body, num_bytes)
        self._finish(lingers=True)

    def _finish(self, *, lingers: bool = False) -> None:
        """Close behind the last answer; one that `lingers` leaves the peer the time to read it."""
        if self._is_finished or self._is_lost:
            return
        self._is_finished = self._is_over = True
        self._quiet_since_s = self._context.loop.time()
        self._progress.restart()
        self._outgoing.flush()
        if lingers and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    # Called by the port.

    def sweep(self, now_s: float) -> None:
        """Called about once a second: close what has used up its time."""
        if self._is_lost:
            return
        times = self._context.limits.times
        if self._outgoing.stalled_s(now_s) > times.slow_reader_s:
            self._context.counts.violated(Protocol.HTTP1, Violation.SLOW_READER)
            self._transport.abort()
        elif self._is_finished:
            self._check_end(now_s)
        elif self._turn is not None or self._waiting:
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
        """Everything was answered; the peer may take the time to read it, and to send what is dropped."""
        times = self._context.limits.times
        if self._transport.get_write_buffer_size():
            return
        pause_s = self._progress.paused_s(now_s, self._num_dropped)
        if pause_s > times.linger_s or now_s - self._quiet_since_s > times.body_pause_s:
            self._transport.abort()

    def _check_body(self, incoming: Incoming, now_s: float) -> None:
        times = self._context.limits.times
        if self._progress.is_too_slow(now_s, incoming.collector.num_bytes, times):
            message = f"the request's body came too slowly: at most {times.body_pause_s:g} s without a byte, and "
            self._refuse(message_response(408, f"{message}{times.body_rate} bytes a second"), Violation.SLOW_BODY)
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

    def _forget_heads(self) -> None:
        """An idle connection is to take little memory, and not to keep what may be secrets."""
        self._last_data, self._last_head = b"", None
        self._memo = HeadMemo(self._context.limits)

    def _check_age(self, now_s: float) -> None:
        max_age_s = self._context.limits.keepalive.max_age_s
        if max_age_s is not None and now_s - self._since_s > max_age_s and not self._is_draining:
            self.shutdown()

    def shutdown(self) -> None:
        """Take no further request; close once the ones that came are answered. Safe to repeat."""
        self._is_draining = True
        if self._is_idle():
            self._finish()

    def abort(self) -> None:
        """Close now, whatever is in progress."""
        self._transport.abort()


class _NoFrontend:
    """Of a port that serves no HTTP: says so."""

    def handle(self, exchange: HttpExchange) -> None:
        exchange.respond(message_response(404, _NO_HTTP))
