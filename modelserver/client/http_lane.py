"""HTTP/1.1 for load: a keep-alive connection with one request in flight, answers checked and thrown away."""

from __future__ import annotations

import asyncio
from time import monotonic_ns

from modelserver.client.address import Address
from modelserver.client.heads import AnswerHead, AnswerHeads, failure_text
from modelserver.client.http_connection import Asking, ConnectionOwner, HttpConnection
from modelserver.client.lane import Answers, Lane
from modelserver.errors import UnavailableError
from modelserver.wire.context import Arena

RECONNECT_DELAY_S = 0.05


class HttpLane(Lane, Asking, ConnectionOwner):
    """A connection that is opened again when the server closes it."""

    is_bodyless = False

    def __init__(self, address: Address, answers: Answers, arena: Arena | None = None) -> None:
        """The lanes of one event loop may share an `arena`."""
        super().__init__(answers)
        self._address = address
        self._arena = arena or Arena()
        self._heads = AnswerHeads()
        self._connection: HttpConnection | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_asked = False
        self._status = 0
        self._pieces: list[bytes] = []
        # Of the last answer: where its JSON ends.
        self.json_len: int | None = None

    async def connect(self) -> None:
        connection = HttpConnection(self, self._heads, self._arena)
        await self._address.connect(lambda: connection, "http/1.1")
        self._connection = connection

    def send(self, request: bytes) -> None:
        self._is_asked = True
        connection = self._connection
        self.start_ns = self.sent_ns = monotonic_ns()
        if connection is None:
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(request))
            return
        connection.ask(self, request, b"")
        self.sent_ns = monotonic_ns()

    def close(self) -> None:
        self._is_asked = False
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._connection is not None:
            self._connection.abandon()

    async def _reconnect(self, request: bytes) -> None:
        try:
            await self.connect()
        except UnavailableError as error:
            await asyncio.sleep(RECONNECT_DELAY_S)
            self._finish(monotonic_ns(), error.message)
            return
        if self._connection is not None:
            self._connection.ask(self, request, b"")
            self.sent_ns = monotonic_ns()

    # Called by the connection.

    def forget(self, connection: HttpConnection) -> None:
        if connection is self._connection:
            self._connection = None

    def answered(self, head: AnswerHead, body: bytes) -> None:
        """The usual case: this is the cost of a request."""
        self.first_ns = now_ns = monotonic_ns()
        self.json_len = head.json_len
        if head.status != 200:
            self.answer = body
            self._finish(now_ns, failure_text(head.status, body))
            return
        if self.keeps_answer:
            self.take(body, now_ns)
            self.answer = body
            self._pieces.clear()
        self._is_asked = False
        self.answers.answered(self, now_ns, None)

    def begun(self, head: AnswerHead) -> None:
        self.first_ns = monotonic_ns()
        self.json_len = head.json_len
        self._status = head.status

    def more(self, data: bytes) -> None:
        if self.keeps_answer:
            self.take(data, monotonic_ns())
        elif self._status != 200:
            self._pieces.append(data)

    def take(self, piece: bytes, now_ns: int) -> None:
        """Called with the pieces of the body of an answer that is kept; `now_ns` is when they arrived."""
        del now_ns
        self._pieces.append(piece)

    def ended(self) -> None:
        failure = None
        if self.keeps_answer or self._status != 200:
            self.answer = b"".join(self._pieces)
            if self._status != 200:
                failure = failure_text(self._status, self.answer)
        self._finish(monotonic_ns(), failure)

    def lost(self, reason: str, *, is_refused: bool) -> None:
        del is_refused
        self._finish(monotonic_ns(), reason)

    def _finish(self, now_ns: int, failure: str | None) -> None:
        self._pieces.clear()
        if self._is_asked:
            self._is_asked = False
            self.answers.answered(self, now_ns, failure)
