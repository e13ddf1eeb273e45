"""One HTTP request on its way through the router: to a replica, again to another where that is safe, and back."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from modelserver.client.heads import HOP_FIELDS, AnswerHead
from modelserver.client.http_connection import HttpConnection
from modelserver.client.http_pool import Connecting
from modelserver.core.body_pipe import BodyPipe
from modelserver.core.tensor import Buffer
from modelserver.endpoints.endpoint import Endpoint, Outcome
from modelserver.errors import ServerError, UnavailableError
from modelserver.protocol.exchange import HttpExchange, HttpHead, ResponseWriter, RouteMemo
from modelserver.protocol.response import EarlyAnswerError, HttpResponse
from modelserver.router.affinity import (
    SESSION_HEADER,
    Prompt,
    has_prompt,
    prompt_of,
    sequence_of_json,
)
from modelserver.router.families import error_event, errors_of
from modelserver.router.replicas import Replicas, Waiting

HOPS: Final = "x-modelserver-router-hops"
MAX_HOPS: Final = 4
# Of a body that arrives in pieces: kept until the replica's answer begins, so that it can be sent again.
_MAX_KEPT_BYTES: Final = 1 << 20
# Methods whose requests may be sent twice (RFC 9110, 9.2.2).
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})
_LENGTH: Final = b"content-length: %d\r\n\r\n"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_UNSENT: Final = HOP_FIELDS | {"expect", HOPS}


def num_hops(headers: object) -> int:
    """The routers that a request has passed, from the value of its header."""
    text = headers if isinstance(headers, str) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0


class Passage(RouteMemo):
    """What requests of one head have in common: the head that replicas get, and how they are chosen."""

    __slots__ = ("is_bodyless", "is_idempotent", "json_length", "num_hops", "prompts", "session", "start")

    def __init__(self, head: HttpHead, peer: str) -> None:
        headers = head.headers
        self.num_hops = num_hops(headers.get(HOPS))
        self.is_bodyless = head.method == "HEAD"
        self.is_idempotent = head.method in _IDEMPOTENT
        self.session = headers.get(SESSION_HEADER, "").encode("latin-1", "replace")
        length = headers.get("inference-header-content-length", "")
        self.json_length = int(length) if length.isascii() and length.isdigit() else 0
        self.prompts = head.method == "POST" and has_prompt(head.path) and "content-encoding" not in headers
        target = f"{head.path}?{head.query}" if head.query else head.path
        dropped = {option.strip().lower() for option in headers.get("connection", "").split(",")} | _UNSENT
        lines = [
            f"{head.names.get(name, name)}: {value}"
            for name, value in headers.items()
            if name not in dropped and name != "x-forwarded-for"
        ]
        via = headers.get("x-forwarded-for", "")
        client = peer.rpartition(":")[0].strip("[]")
        if client:
            lines.append(f"x-forwarded-for: {via + ', ' if via else ''}{client}")
        if "host" not in headers:  # of a client that speaks HTTP/1.0
            lines.append("host: localhost")
        lines.append(f"{HOPS}: {self.num_hops + 1}")
        text = "\r\n".join([f"{head.method} {target} HTTP/1.1", *lines, ""])
        self.start = text.encode("latin-1", "replace")

    def head(self, method: str, num_bytes: int | None) -> bytes:
        """The head of a request with a body of that many bytes; None: in chunks."""
        if num_bytes is None:
            return self.start + _CHUNKED
        if num_bytes or method in _BODY_METHODS:
            return self.start + _LENGTH % num_bytes
        return self.start + b"\r\n"


class HttpForward(Connecting, Waiting):
    """From the request to the end of its answer. Event loop thread only.

    The body is `_pieces`, which are kept so that they can be sent again while `_is_kept`. `_exchange` is None as long
    as the client sends a body that is passed on while it arrives.
    """

    __slots__ = (
        "_begun_early",
        "_connecting",
        "_early",
        "_endpoint",
        "_exchange",
        "_head",
        "_is_kept",
        "_is_over",
        "_is_whole",
        "_length",
        "_media_type",
        "_num_kept",
        "_passage",
        "_pieces",
        "_prompt",
        "_replicas",
        "_room",
        "_session",
        "_start_ns",
        "_tail",
        "_tried",
        "_upload",
        "_upstream",
        "_writer",
        "is_bodyless",
    )

    def __init__(self, replicas: Replicas, head: HttpHead, passage: Passage) -> None:
        self._replicas = replicas
        self._head = head
        self._passage = passage
        self.is_bodyless = passage.is_bodyless
        self._exchange: HttpExchange | None = None
        self._upload: Upload | None = None
        self._pieces: list[Buffer] = []
        self._num_kept = 0
        self._length: int | None = 0
        self._is_kept = self._is_whole = True
        self._session = passage.session
        self._prompt: Prompt | None = None
        self._tried: tuple[Endpoint, ...] = ()
        self._endpoint: Endpoint | None = None
        self._upstream: HttpConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._start_ns = 0
        # The answer in pieces, and the last bytes of it.
        self._writer: ResponseWriter | None = None
        self._tail = b""
        self._media_type = ""
        self._room: asyncio.Task[None] | None = None
        # The head of an answer that begins before the request is complete, and as much of the body as has arrived.
        self._begun_early: AnswerHead | None = None
        self._early: list[bytes] = []
        self._is_over = False
        replicas.counts.begin()

    # The request.

    def forward(self, exchange: HttpExchange) -> None:
        """Send a request whose body is complete."""
        self._exchange = exchange
        exchange.on_disconnect = self._leave
        body = exchange.body
        self._pieces = [body]
        self._length = len(body)
        self._look(body)
        self.choose()

    def _look(self, body: Buffer) -> None:
        """Find in the body what should lead it to a certain replica."""
        passage = self._passage
        if self._session or not len(body):
            return
        if passage.prompts:
            self._prompt = prompt_of(body) if self._replicas.uses_prompts else None
        elif self._head.path.endswith("/infer"):
            self._session = sequence_of_json(body, passage.json_length)

    def choose(self) -> None:
        """Send the request to the next replica, or answer that there is none."""
        replicas = self._replicas
        try:
            endpoint = replicas.choose(self._session, self._prompt, self._tried)
        except UnavailableError as error:
            if not (self._is_kept and replicas.wait(self)):
                self._fail(error)
            return
        replica = replicas.replica(endpoint)
        self._begin(endpoint)
        upstream = replica.http.take()
        if upstream is None:
            self._connecting = replica.http.connect(self)
        else:
            self.connected(upstream)

    def _begin(self, endpoint: Endpoint) -> None:
        endpoints = self._replicas.endpoints
        if not self._tried:
            endpoints.retry_budget.deposit()
        self._tried = (*self._tried, endpoint)
        self._endpoint = endpoint
        self._start_ns = time.monotonic_ns()
        endpoints.begin(endpoint)

    def _finish(self, outcome: Outcome, problem: str = "") -> None:
        """The attempt is over."""
        endpoint, self._endpoint, self._upstream = self._endpoint, None, None
        if endpoint is not None:
            self._replicas.endpoints.finish(endpoint, outcome, start_ns=self._start_ns, problem=problem)

    def connected(self, upstream: HttpConnection) -> None:
        self._connecting = None
        self._upstream = upstream
        pieces, is_chunked = self._pieces, self._length is None
        head = self._passage.head(self._head.method, self._length)
        if len(pieces) == 1 and not is_chunked:
            upstream.ask(self, head, pieces[0], is_whole=self._is_whole)
        else:
            framed = b"".join([_chunk(piece) if is_chunked else bytes(piece) for piece in pieces])
            end = _LAST_CHUNK if is_chunked and self._is_whole else b""
            upstream.ask(self, head, framed + end, is_whole=self._is_whole)
        if self._upload is not None:
            self._mind_kept()
            self.has_room()

    def unreachable(self, reason: str) -> None:
        self._connecting = None
        self._finish(Outcome.CONNECT_FAILED, reason)
        self._again()

    def _again(self) -> None:
        self._replicas.counts.num_retries += 1
        self.choose()

    # A body that is passed on while it arrives.

    def upload(self, upload: Upload) -> None:
        """The body comes by `upload`."""
        self._upload = upload
        self._length = upload.num_bytes
        self._is_whole = False

    def take(self, piece: bytes) -> None:
        """The next piece of the body."""
        if self._is_over:
            return  # the replica has answered
        is_first = not self._num_kept
        self._num_kept += len(piece)
        if self._is_kept:
            self._pieces.append(piece)
        if is_first:
            self._look(piece)
            self.choose()
        elif self._upstream is not None:
            self._upstream.send(_chunk(piece) if self._length is None else piece)
            self._mind_kept()

    def _mind_kept(self) -> None:
        """What is too much to keep cannot be sent again."""
        if self._is_kept and self._num_kept > _MAX_KEPT_BYTES and not self._is_whole:
            self._is_kept = False
            self._pieces = []

    @property
    def takes_more(self) -> bool:
        """Whether the client should send more now."""
        if self._is_over:
            return True
        upstream = self._upstream
        return self._num_kept <= _MAX_KEPT_BYTES if upstream is None else not upstream.is_full

    def attach(self, exchange: HttpExchange) -> None:
        """The body is complete, and this is where the answer goes."""
        self._exchange = exchange
        self._is_whole = True
        if self._is_over:
            return
        exchange.on_disconnect = self._leave
        if not self._num_kept:
            self.choose()
        elif self._upstream is not None:
            self._upstream.send(_LAST_CHUNK if self._length is None else b"", is_whole=True)
            if self._begun_early is not None:
                early, self._early = self._early, []
                self.begun(self._begun_early)
                for piece in early:
                    self.more(piece)

    def has_room(self) -> None:
        if self._upload is not None:
            self._upload.tell_room()

    # The answer.

    def answered(self, head: AnswerHead, body: bytes) -> None:
        status = head.status
        if status >= 500:
            if status == 503 and self._tries_elsewhere():
                return
            self._finish(Outcome.SERVER_ERROR if status not in (501, 503, 505) else Outcome.OVERLOADED, f"{status}")
        else:
            self._finish(Outcome.DONE if status < 400 else Outcome.CLIENT_ERROR)
        self._respond(HttpResponse(status, head.headers, (body,)))

    def _tries_elsewhere(self) -> bool:
        """Whether the replica has refused the request, and another one may take it.

        A `retry-after` is of the request's model or caller: it says nothing about other requests.
        """
        endpoints = self._replicas.endpoints
        if not (self._is_kept and self._is_whole and self._replicas.has_other(self._tried)):
            return False
        if not endpoints.retry_budget.take():
            return False
        self._finish(Outcome.OVERLOADED, "503")
        self._again()
        return True

    def _respond(self, response: HttpResponse) -> None:
        exchange, upload = self._exchange, self._upload
        self._end()
        if exchange is not None:
            exchange.respond(response)
        elif upload is not None:
            upload.fail(EarlyAnswerError(response))

    def begun(self, head: AnswerHead) -> None:
        exchange, upstream = self._exchange, self._upstream
        if upstream is None:
            return
        if exchange is None:
            self._begun_early, self._early = head, []
            return
        self._begun_early = None
        self._pieces = []
        headers = list(head.headers)
        if head.length is not None:
            headers.append(("content-length", str(head.length)))
        self._tail = b"\n\n"
        self._media_type = head.media_type
        self._writer = exchange.start(head.status, headers)

    def more(self, data: bytes) -> None:
        writer = self._writer
        if writer is None:
            self._keep_early(data)
            return
        self._tail = data[-2:]
        try:
            if not writer.send(data) and self._upstream is not None and self._room is None:
                self._upstream.pause()
                self._room = asyncio.get_running_loop().create_task(self._wait_for_room(writer))
        except ConnectionError:
            self._leave()

    def _keep_early(self, data: bytes) -> None:
        """A part of an answer whose request is not complete: it is sent as a whole, unless the request ends before."""
        self._early.append(data)
        if sum(map(len, self._early)) > _MAX_KEPT_BYTES:
            self._break("the replica answered at length before the request was complete")

    async def _wait_for_room(self, writer: ResponseWriter) -> None:
        try:
            await writer.wait_for_room()
        except ConnectionError:
            self._leave()
            return
        self._room = None
        if self._upstream is not None:
            self._upstream.resume()

    def ended(self) -> None:
        early, self._begun_early = self._begun_early, None
        if early is not None:
            self.answered(early, b"".join(self._early))
            return
        self._finish(Outcome.DONE)
        self._close()

    def _close(self) -> None:
        """End the answer in pieces."""
        writer, self._writer = self._writer, None
        self._end()
        if writer is not None:
            self._replicas.run(writer.close())

    def lost(self, reason: str, *, is_refused: bool) -> None:
        self._finish(Outcome.LOST, reason)
        self._begun_early = None
        if self._writer is not None:
            self._break_off(reason)
            return
        may_repeat = is_refused or (self._passage.is_idempotent and self._replicas.endpoints.retry_budget.take())
        if may_repeat and self._is_kept:
            self._again()
            return
        self._replicas.counts.num_lost += 1
        self._break(f"the replica was lost while it had the request, which may have been processed: {reason}")

    def _break_off(self, reason: str) -> None:
        """The replica is gone in the middle of its answer: tell the client, never just end."""
        self._replicas.counts.num_broken_streams += 1
        writer, self._writer = self._writer, None
        assert writer is not None, "an answer has begun"
        self._end()
        if self._is_between_events():
            try:
                writer.send(error_event(self._head.path, f"the replica was lost while it answered: {reason}"))
            except ConnectionError:
                return
            self._replicas.run(writer.close())
        else:
            writer.abort()

    def _is_between_events(self) -> bool:
        """Whether the answer is a stream of events, and the last one is complete."""
        if self._media_type == "text/event-stream":
            return self._tail == b"\n\n"
        return self._media_type == "application/x-ndjson" and self._tail[-1:] == b"\n"

    def _break(self, text: str) -> None:
        """The request failed, and cannot be sent again."""
        if self._upstream is not None:
            self._upstream.abandon()
            self._finish(Outcome.LOST, text)
        self._respond(errors_of(self._head.path).refused(502, text))

    def _fail(self, error: ServerError) -> None:
        """There is no replica for the request."""
        self._replicas.counts.num_unserved += 1
        self._respond(errors_of(self._head.path).failed(error))

    def unserved(self, error: ServerError) -> None:
        self._fail(error)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._pieces = []
            self._replicas.counts.end()

    def _leave(self) -> None:
        """The client has left."""
        if self._is_over:
            return
        upstream, self._writer = self._upstream, None
        if self._connecting is not None:
            self._connecting.cancel()
        if self._room is not None and self._room is not asyncio.current_task():
            self._room.cancel()
        self._replicas.stop_waiting(self)
        self._finish(Outcome.ABANDONED)
        self._end()
        if upstream is not None:
            upstream.abandon()

    def leave(self) -> None:
        """The client has left before its request was complete."""
        self._leave()


class Upload(BodyPipe):
    """A body that is passed on while it arrives: nothing reads it from a thread."""

    def __init__(self, forward: HttpForward, num_bytes: int | None) -> None:
        super().__init__(num_bytes)
        self.forward = forward
        forward.upload(self)

    @property
    def has_room(self) -> bool:
        return self.error is not None or self.forward.takes_more

    def put(self, piece: bytes) -> None:
        if piece and self.error is None:
            self.forward.take(piece)

    def drop(self) -> None:
        if not self.is_attached:
            self.forward.leave()

    is_attached = False

    def attach(self, exchange: HttpExchange) -> None:
        """The body is complete."""
        self.is_attached = True
        self.on_change = None
        self.forward.attach(exchange)

    def tell_room(self) -> None:
        """There may be room again."""
        self._change()


def _chunk(piece: Buffer) -> bytes:
    return b"".join((b"%x\r\n" % len(piece), piece, b"\r\n"))
