"""Reads the requests of one HTTP/1.1 connection, and begins each one in its turn.

Heads that repeat are not parsed again, and large bodies are received into their own memory.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from typing import Any

from modelserver.errors import PayloadTooLargeError, ServerError
from modelserver.protocol.exchange import HttpExchange, HttpHandler, ResponseWriter
from modelserver.protocol.response import HttpResponse, body_refused, message_response
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.assembly import owner_of
from modelserver.wire.body import MIN_DIRECT_BYTES
from modelserver.wire.busy_poll import HTTP1_WOKEN_NS, ReceiveSoon
from modelserver.wire.context import WireContext
from modelserver.wire.http1.exchange import Http1Exchange
from modelserver.wire.http1.head import END_OF_HEAD, ForeignError, RefusedError, RequestHead, check_beginning
from modelserver.wire.http1.incoming_body import Incoming
from modelserver.wire.http1.memo import HeadMemo
from modelserver.wire.http1.outgoing import Outgoing
from modelserver.wire.limits import Progress

_logger = logging.getLogger(__name__)

# Bodies of requests that wait for their turn before the connection is read no further.
_MAX_WAITING_BYTES = 1024 * 1024
# Requests that one connection begins before others have their turn.
_MAX_NEW_PER_READ = 128
# The most bytes of a refused client that are still read: a close with unread bytes could overtake the answer. Many
# clients send all of a body before they read; one that is too large is dropped up to the size of a permitted one.
_MAX_DROPPED_BYTES = 64 * 1024
_NO_HTTP = "this port serves gRPC only, which needs HTTP/2"


class RequestReader(asyncio.BufferedProtocol, abc.ABC):
    """The reading half of a connection.

    Received bytes go through these in order: `_rest` are bytes of an incomplete head, or held bytes (`_is_held`):
    further requests while enough others wait, or a body that has had its turn. `_incoming` is the request whose body is
    being received. `_waiting` are complete requests, `_exchange` is being answered. `_refusal` is the answer to an
    invalid request, which is the last answer; it waits while `_is_put_off`. When `_is_over`, no more requests are read.
    """

    __slots__ = (
        "_arena",
        "_context",
        "_exchange",
        "_frontend",
        "_has_asked",
        "_head_since_s",
        "_incoming",
        "_is_draining",
        "_is_held",
        "_is_over",
        "_is_put_off",
        "_is_quiet",
        "_last_data",
        "_last_head",
        "_last_len",
        "_last_size",
        "_max_dropped",
        "_memo",
        "_memory",
        "_num_dropped",
        "_outgoing",
        "_progress",
        "_receive_soon",
        "_recognizes",
        "_refusal",
        "_rest",
        "_room",
        "_waiting",
    )

    def __init__(self, context: WireContext) -> None:
        self._context = context
        self._frontend: HttpHandler = context.http or _NoHandler()
        self._arena = context.arena.view
        self._memory = context.arena.memory
        self._outgoing: Outgoing
        self._receive_soon: ReceiveSoon | None = None
        self._memo = HeadMemo(context.limits)
        self._recognizes = context.limits.recognizes
        # The last head: usually the next one is the same.
        self._last_data = b""
        self._last_head: RequestHead | None = None
        # The size of that head, and with its body; -1 unless the body is plain and the connection continues after it.
        self._last_len = 0
        self._last_size = -1
        self._rest = b""
        self._incoming: Incoming | None = None
        self._room: memoryview | None = None  # memory that the body of `_incoming` is received into directly
        self._waiting: list[Http1Exchange] = []
        self._exchange: Http1Exchange | None = None
        self._refusal: HttpResponse | None = None
        self._num_dropped = 0
        self._max_dropped = _MAX_DROPPED_BYTES
        self._is_held = self._is_over = self._is_draining = self._is_quiet = self._is_put_off = False
        self._has_asked = False  # whether any request has been received
        self._progress = Progress()  # of `_incoming`, or of dropped data
        # When the awaited head began; None while none is awaited.
        self._head_since_s: float | None = None

    @property
    @abc.abstractmethod
    def peer(self) -> str:
        """The address of the client."""

    @abc.abstractmethod
    def answer(self, request: RequestHead, response: HttpResponse) -> None:
        """Called by the exchange."""

    @abc.abstractmethod
    def begin_pieces(self, request: RequestHead, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        """Called by the exchange."""

    @abc.abstractmethod
    def _finish(self, *, lingers: bool = False) -> None:
        """Close after the last answer; with `lingers` the peer gets time to read it."""

    @abc.abstractmethod
    def _set_reading(self) -> None:
        """Read from the client, or pause, as there is room for what it sends."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """All received bytes are read: send the collected answers."""

    # Called by the transport.

    def get_buffer(self, _sizehint: int) -> memoryview:
        room = self._room
        return self._arena if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        self._is_quiet = False
        request, outgoing = self._last_head, self._outgoing
        if (
            nbytes == self._last_size
            and request is not None
            and self._memory.startswith(self._last_data)
            and self._exchange is None
            and not outgoing.is_paused
            and self._is_free()
        ):
            # Exactly one complete request with the last head, the usual case on the hot path: as `_receive`.
            exchange: Any = Http1Exchange(self, request, self._arena[self._last_len : nbytes].tobytes())
            self._exchange = exchange  # until its answer, which may be there when `handle` returns
            self._head_since_s = None
            outgoing.is_lone = True
            self._frontend.handle(exchange)
            outgoing.is_lone = False
            if self._is_over:
                self._settle()
            elif self._exchange is None:
                self._context.busy_poll.expect(HTTP1_WOKEN_NS, self._receive_soon)
        elif self._room is not None:
            self._fill(nbytes)
        elif nbytes >= MIN_DIRECT_BYTES:
            self._receive_large(nbytes)
        else:
            self._receive(self._arena[:nbytes].tobytes())

    def _is_free(self) -> bool:
        """Whether the next bytes begin a request and no earlier work is due."""
        return not (
            self._rest
            or self._waiting
            or self._incoming is not None
            or self._is_held
            or self._is_over
            or self._is_draining
        )

    def _receive(self, data: bytes) -> None:
        """Read the received bytes."""
        self._outgoing.is_collecting = True
        if self._is_held:
            self._rest += data
        else:
            self._go_through(data)
        self._settle()

    def _go_through(self, data: bytes) -> None:
        """Read new bytes together with the kept ones."""
        at = self._feed(data, 0) if self._incoming is not None else 0
        if self._is_held:
            self._rest = data[at:]
        elif self._is_over:
            self._num_dropped += len(data) - at
        else:
            self._read(self._rest + data if self._rest else data, at)

    def _read(self, data: bytes, at: int) -> None:
        """Begin the requests in `data` from `at` on, or let them wait; incomplete bytes become `_rest`.

        One function, because it is most of the cost of a small request.
        """
        size, start, num_left = len(data), at, _MAX_NEW_PER_READ
        outgoing = self._outgoing
        while at < size and not self._is_over:
            if num_left == 0 or (self._waiting and self._is_queue_full()):
                self._is_held = True
                break
            request = self._last_head if self._recognizes else None
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
                if self._is_held:
                    break
                continue
            exchange = Http1Exchange(self, request, data[body_at:at])
            if self._exchange is None and not self._waiting and not outgoing.is_paused:
                self._exchange = exchange
                self._frontend.handle(exchange)
            else:
                self._waiting.append(exchange)
        if at >= size or (self._is_over and not self._is_held):
            self._rest = b""
            self._head_since_s = None
        else:
            self._rest = data[at:]
            if at > start or self._head_since_s is None:
                self._head_since_s = self._context.loop.time()

    def _read_head(self, data: bytes, at: int) -> int:
        """Make the head at `at` the last one; returns where it ends, 0 if it does not, or if it is refused."""
        limits = self._context.limits
        # The search begins after an empty line before the head.
        end = data.find(END_OF_HEAD, at + 2) + len(END_OF_HEAD)
        try:
            if end < len(END_OF_HEAD):
                check_beginning(data[at : at + limits.head.max_http1_bytes + 1], limits.head)
                return 0
            head_data = data[at:end]
            self._last_head = self._memo.get(head_data)
        except RefusedError as refused:
            if isinstance(refused, ForeignError) and not self._has_asked:
                self._leave(refused)
            else:
                self._refuse(message_response(refused.status, refused.message), refused.violation)
            return 0
        self._has_asked = True
        self._last_data = head_data
        self._last_len = len(head_data)
        request = self._last_head
        is_plain = request.has_plain_body and request.keeps_alive
        self._last_size = self._last_len + request.content_length if is_plain and limits.recognizes else -1
        return end

    def _begin_body(self, request: RequestHead, data: bytes, at: int) -> int:
        """The body is not complete, or not plain. Returns where it ends in `data`."""
        incoming = self._admit(request)
        return len(data) if incoming is None else self._feed(data, at)

    def _admit(self, request: RequestHead) -> Incoming | None:
        """Begin to receive a body, unless the frontend refuses the request by its head."""
        context, peer = self._context, self.peer
        max_bytes = context.limits.max_body_bytes
        checked = self._frontend.check_head(request.http, peer)
        if isinstance(checked, HttpResponse):
            self._max_dropped = max(_MAX_DROPPED_BYTES, max_bytes)
            self._end_with(checked)
            self._put_off(context.refused_peers.wait_s(owner_of("", peer)))
            return None
        if checked.max_body_bytes is not None:
            max_bytes = min(max_bytes, checked.max_body_bytes)
        length = None if request.is_chunked else request.content_length
        pipe = None if checked.open_body is None else checked.open_body(length)
        incoming = Incoming(request, max_bytes, context.assembly, owner_of(checked.caller, peer), pipe)
        incoming.collector.on_given_up = self._give_up_soon
        incoming.collector.on_room = self._set_reading
        self._incoming = incoming
        self._progress.restart()
        return incoming

    def _put_off(self, wait_s: float) -> None:
        """Let the refusal wait; meanwhile nothing is read."""
        if wait_s > 0:
            self._is_put_off = True
            self._context.loop.call_later(wait_s, self._end_wait)

    def _end_wait(self) -> None:
        self._is_put_off = False
        self._outgoing.is_collecting = True
        self._settle()

    def _give_up_soon(self) -> None:
        """The budget of large bodies has taken the memory; another connection is at work now."""
        self._context.loop.call_soon(self._give_up)

    def _give_up(self) -> None:
        incoming = self._incoming
        if incoming is not None and incoming.collector.error is not None:
            self._outgoing.is_collecting = True
            self._go_on(incoming)
            self._settle()

    def _feed(self, data: bytes, at: int) -> int:
        """Give the body being received its part of `data`; returns where that ends."""
        incoming = self._incoming
        assert incoming is not None, "a body is being received"
        try:
            if incoming.collector.error is None:
                at = incoming.feed(data, at)
        except RefusedError as refused:
            self._refuse(message_response(refused.status, refused.message), refused.violation)
            return len(data)
        self._go_on(incoming)
        if self._refusal is not None:
            return len(data)
        # It has had its turn, and is not complete.
        self._is_held = self._incoming is not None and at < len(data)
        return at

    def _fill(self, nbytes: int) -> None:
        """This many bytes of a body were received in place."""
        incoming = self._incoming
        assert incoming is not None, "a body is being received"
        self._outgoing.is_collecting = True
        incoming.collector.filled(nbytes)
        self._go_on(incoming)
        self._settle()

    def _go_on(self, incoming: Incoming) -> None:
        """More of the body has arrived, perhaps all."""
        error = incoming.collector.error
        if error is not None:
            self._refuse_body(incoming, error)
        elif incoming.is_complete:
            self._incoming = self._room = None
            self._take(Http1Exchange(self, incoming.request, incoming.finish()))
        else:
            self._room = incoming.collector.room()

    def _receive_large(self, nbytes: int) -> None:
        """Read the received bytes; if they begin with the head of a large body, the body is copied only once."""
        view, limit = self._arena, self._context.limits.head.max_http1_bytes
        is_free = not (self._rest or self._waiting or self._is_over or self._is_held) and self._incoming is None
        end = self._context.arena.memory.find(END_OF_HEAD, 2, min(nbytes, limit)) + len(END_OF_HEAD) if is_free else 0
        body_at = self._read_head(view[:end].tobytes(), 0) if end > len(END_OF_HEAD) else 0
        request = self._last_head
        if body_at == 0 or request is None or request.is_chunked or request.content_length < MIN_DIRECT_BYTES:
            self._receive(view[:nbytes].tobytes())
            return
        self._is_over = not request.keeps_alive
        self._outgoing.is_collecting = True
        self._head_since_s = None
        body_end = min(body_at + request.content_length, nbytes)
        rest = self._rest = view[body_end:nbytes].tobytes()
        incoming = self._admit(request)
        if incoming is None:
            self._settle()
            return
        incoming.is_invited = True
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
            or sum([len(exchange.body) for exchange in waiting]) > _MAX_WAITING_BYTES
        )

    def _take(self, exchange: Http1Exchange) -> None:
        """A request is complete."""
        self._waiting.append(exchange)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._exchange is None and not self._outgoing.is_paused:
            exchange = self._exchange = self._waiting.pop(0)
            self._frontend.handle(exchange)

    # Invalid requests.

    def _refuse(self, response: HttpResponse, violation: Violation) -> None:
        """Answer an invalid request, after the answers that are due, and close."""
        self._context.counts.violated(Protocol.HTTP1, violation)
        self._end_with(response)

    def _end_with(self, response: HttpResponse) -> None:
        """Answer a request that is not read further, after the answers that are due, and close."""
        if self._incoming is not None:
            self._incoming.collector.drop()
        self._incoming = self._room = None
        self._rest = b""
        self._is_over = True
        self._is_held = False
        self._refusal = response

    def _leave(self, error: ForeignError) -> None:
        """Close on a client of another protocol, without an answer that it would not understand."""
        self._context.counts.violated(Protocol.HTTP1, error.violation)
        _logger.debug("closed the connection of %s: %s", self.peer, error.message)
        self._rest = b""
        self._is_over = True
        self._finish()

    def _refuse_body(self, incoming: Incoming, error: ServerError) -> None:
        response = body_refused(error, self._frontend.errors(incoming.request.http.path))
        self._max_dropped = max(_MAX_DROPPED_BYTES, self._context.limits.max_body_bytes)
        if incoming.collector.is_piped:  # no limit of the wire's
            self._end_with(response)
            return
        is_too_large = isinstance(error, PayloadTooLargeError)
        violation = Violation.BODY_TOO_LARGE if is_too_large else Violation.ASSEMBLY_BUDGET
        self._refuse(response, violation)

    def _forget_heads(self) -> None:
        """An idle connection should take little memory, and keep no possible secrets."""
        self._last_data, self._last_head, self._last_size = b"", None, -1
        self._memo = HeadMemo(self._context.limits)


class _NoHandler(HttpHandler):
    """Tell the client of a port without HTTP that it serves none."""

    def handle(self, exchange: HttpExchange) -> None:
        exchange.respond(message_response(404, _NO_HTTP))
