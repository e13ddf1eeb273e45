"""HTTP/1.1 for load: a keep-alive connection with one request in flight, answers checked and thrown away."""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import cast

from modelserver.client.address import Address
from modelserver.client.heads import AnswerHead, ChunkedBody, MalformedAnswerError, failure_text, read_head
from modelserver.client.lane import Answers, Lane
from modelserver.errors import UnavailableError

MAX_REMEMBERED_HEADS = 1024
RECONNECT_DELAY_S = 0.05


class HttpLane(Lane, asyncio.Protocol):
    """A connection that opens itself again when the server closes it."""

    def __init__(self, address: Address, answers: Answers) -> None:
        super().__init__(answers)
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._request: bytes | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        # Heads of earlier answers: those of equal requests are equal.
        self._heads: dict[bytes, AnswerHead] = {}
        self._head: AnswerHead | None = None
        self._left = 0
        self._chunks: ChunkedBody | None = None
        self._pieces: list[bytes] | None = None
        self._pending = b""
        # Set while there is no connection that could still call us.
        self._is_lost = asyncio.Event()
        self._is_lost.set()
        # Of the last answer that was kept: where its JSON ends.
        self.json_len: int | None = None

    async def connect(self) -> None:
        await self._address.connect(lambda: self, "http/1.1")

    def send(self, request: bytes) -> None:
        self._request = request
        transport = self._transport
        if transport is None:
            self.start_ns = self.sent_ns = monotonic_ns()
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(request))
            return
        self.start_ns = monotonic_ns()
        transport.write(request)
        self.sent_ns = monotonic_ns()

    def close(self) -> None:
        self._request = None
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _reconnect(self, request: bytes) -> None:
        await self._is_lost.wait()
        try:
            await self.connect()
        except UnavailableError as error:
            await asyncio.sleep(RECONNECT_DELAY_S)
            self._finish(monotonic_ns(), error.message)
            return
        if self._transport is not None:
            self._transport.write(request)
            self.sent_ns = monotonic_ns()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        self._is_lost.clear()
        self._reset()

    def data_received(self, data: bytes) -> None:
        """One function: this is the cost of a request."""
        now_ns = monotonic_ns()
        left = self._left
        if left > 0:
            # A body of known length, of which we count the bytes.
            if self._pieces is not None:
                self.take(data, now_ns)
            self._left = left = left - len(data)
            if left <= 0:
                self._complete(now_ns, left)
            return
        if self._head is None:
            if self._pending:
                data = self._pending + data
            else:
                self.first_ns = now_ns
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._pending = data
                return
            raw = data[:end]
            head = self._heads.get(raw) or self._read_head(raw)
            if head is None or self._request is None:
                self._fail(now_ns, "an answer without a request" if head is not None else None)
                return
            if head.length is not None and head.status == 200 and not self.keeps_answer:
                self._head = head
                self._left = left = head.length + end + 4 - len(data)
                if left <= 0:
                    self._complete(now_ns, left)
                return
            self._begin_body(head, data, end + 4, now_ns)
            return
        self._more(data, now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost.set()
        is_ours, self._transport = self._transport is None, None
        if is_ours or self._request is None:
            return
        now_ns = monotonic_ns()
        head = self._head
        if exc is None and head is not None and head.length is None and not head.is_chunked:
            self._complete(now_ns, 0)
            return
        where = "within its answer" if head is not None or self._pending else "without an answer"
        self._finish(now_ns, f"the server closed the connection {where}" + (f": {exc}" if exc else ""))

    # Less common cases

    def begin(self, head: AnswerHead) -> None:
        """Called with the head of an answer that is kept, or is not 200."""

    def take(self, piece: bytes, now_ns: int) -> None:
        """Called with the pieces of the body of an answer that is kept; `now_ns` is when they arrived."""
        del now_ns
        assert self._pieces is not None, "an answer is kept"
        self._pieces.append(piece)

    def _read_head(self, raw: bytes) -> AnswerHead | None:
        try:
            head = read_head(raw)
        except MalformedAnswerError as error:
            self._fail(monotonic_ns(), str(error))
            return None
        if len(self._heads) >= MAX_REMEMBERED_HEADS:
            self._heads.clear()
        self._heads[raw] = head
        return head

    def _begin_body(self, head: AnswerHead, data: bytes, offset: int, now_ns: int) -> None:
        if 100 <= head.status < 200:
            self._pending = b""
            if len(data) > offset:
                self.data_received(data[offset:])
            return
        self._head = head
        self.begin(head)
        self._pieces = []
        self._pending = b""
        self._chunks = ChunkedBody() if head.is_chunked else None
        self._left = head.length or 0
        if head.length == 0:
            self._complete(now_ns, offset - len(data))
        elif len(data) > offset:
            self._more(data[offset:], now_ns)

    def _more(self, data: bytes, now_ns: int) -> None:
        """Body of an answer that is kept, chunked, or goes to the end of the connection."""
        if self._chunks is not None:
            try:
                piece = self._chunks.feed(data)
            except MalformedAnswerError as error:
                self._fail(now_ns, str(error))
                return
            if piece:
                self.take(piece, now_ns)
            if self._chunks.is_done:
                self._complete(now_ns, 0)
            return
        self.take(data, now_ns)
        if self._left > 0:
            self._left -= len(data)
            if self._left <= 0:
                self._complete(now_ns, self._left)

    def _complete(self, now_ns: int, left: int) -> None:
        head = self._head
        assert head is not None, "an answer ends after its head"
        if left < 0:
            self._fail(now_ns, f"{-left} bytes follow the {head.length} that Content-Length announced")
            return
        failure = None
        if self._pieces is not None or head.status != 200:
            self.answer = b"".join(self._pieces or ())
            self.json_len = head.json_len
            if head.status != 200:
                failure = failure_text(head.status, self.answer)
        if head.is_last and self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._finish(now_ns, failure)

    def _fail(self, now_ns: int, failure: str | None) -> None:
        """The connection cannot be read any further."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if failure is not None:
            self._finish(now_ns, failure)

    def _finish(self, now_ns: int, failure: str | None) -> None:
        is_asked = self._request is not None
        self._request = None
        self._reset()
        if is_asked:
            self.answers.answered(self, now_ns, failure)

    def _reset(self) -> None:
        self._head = None
        self._left = 0
        self._chunks = None
        self._pieces = None
        self._pending = b""
