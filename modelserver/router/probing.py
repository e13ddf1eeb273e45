"""Questions of the router's own to replicas: whether they are ready; and to a source of replicas, line by line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from urllib.parse import urlsplit

import orjson

from modelserver.endpoints.endpoint import Endpoint, EndpointState
from modelserver.errors import UnavailableError
from modelserver.router.http_upstream import AnswerHead, Asking, HttpUpstream
from modelserver.router.replicas import Replicas

_READY = (
    b"GET /v2/health/ready HTTP/1.1\r\nhost: %b\r\nuser-agent: modelserver-router\r\naccept: application/json\r\n\r\n"
)


class _Question(Asking):
    """A GET whose status is awaited, with the body where that comes with it."""

    is_bodyless = False

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.upstream: HttpUpstream | None = None

    def connected(self, upstream: HttpUpstream) -> None:
        if self.answer.done():
            upstream.abandon()
        else:
            self.upstream = upstream
            upstream.ask(self, self._request, b"")

    def unreachable(self, reason: str) -> None:
        self._fail(reason)

    def answered(self, head: AnswerHead, body: bytes) -> None:
        self._take(head, body)

    def begun(self, head: AnswerHead) -> None:
        self._take(head)

    def more(self, data: bytes) -> None:
        """Only the status counts."""

    def ended(self) -> None:
        """The status is there already."""

    def lost(self, reason: str, *, is_refused: bool) -> None:
        del is_refused
        self._fail(reason)

    def has_room(self) -> None:
        """It has no body."""

    def _take(self, head: AnswerHead, body: bytes = b"") -> None:
        self.upstream = None
        if not self.answer.done():
            self.answer.set_result((head.status, body))

    def _fail(self, reason: str) -> None:
        self.upstream = None
        if not self.answer.done():
            self.answer.set_exception(UnavailableError(reason))


async def probe(replicas: Replicas, endpoint: Endpoint) -> EndpointState:
    """Whether a replica is ready; its load is noted. Raises UnavailableError when it does not answer."""
    pool = replicas.replica(endpoint).http
    question = _Question(_READY % endpoint.address.rpartition("://")[2].encode("latin-1", "replace"))
    upstream = pool.take()
    connecting = pool.connect(question) if upstream is None else None
    if upstream is not None:
        question.connected(upstream)
    try:
        status, body = await question.answer
    finally:
        if connecting is not None:
            connecting.cancel()
        if question.upstream is not None:
            question.upstream.abandon()
    document = _document(body)
    in_hand = document.get("inflight_requests")
    if isinstance(in_hand, int):
        replicas.endpoints.report_load(endpoint, in_hand)
    if status < 400:
        return EndpointState.READY
    # A server that is not ready may serve some of its models.
    is_degraded = document.get("state") == EndpointState.DEGRADED.value
    return EndpointState.DEGRADED if is_degraded else EndpointState.STARTING


def _document(body: bytes) -> dict[str, object]:
    """What a replica says besides its status; servers of other kinds say nothing."""
    try:
        document = orjson.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


class _Lines(Asking):
    """A GET whose body is read line by line."""

    is_bodyless = False

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        # A line, or the reason why there will be no more.
        self.lines: asyncio.Queue[bytes | UnavailableError] = asyncio.Queue()
        self.upstream: HttpUpstream | None = None

    def connected(self, upstream: HttpUpstream) -> None:
        self.upstream = upstream
        upstream.ask(self, self._request, b"")

    def unreachable(self, reason: str) -> None:
        self._fail(reason)

    def answered(self, head: AnswerHead, body: bytes) -> None:
        self.begun(head)
        self.more(body)
        self.ended()

    def begun(self, head: AnswerHead) -> None:
        if head.status != HTTPStatus.OK:
            self._fail(f"the status is {head.status}")

    def more(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.lines.put_nowait(line)

    def ended(self) -> None:
        self._fail("the answer ended")

    def lost(self, reason: str, *, is_refused: bool) -> None:
        del is_refused
        self._fail(reason)

    def has_room(self) -> None:
        """It has no body."""

    def _fail(self, reason: str) -> None:
        self.lines.put_nowait(UnavailableError(reason))


async def open_lines(replicas: Replicas, url: str) -> AsyncIterator[bytes]:
    """The lines of the document at `url`, which goes on for as long as it is read. Raises UnavailableError."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"GET {target} HTTP/1.1\r\nhost: {parts.netloc}\r\naccept: application/x-ndjson\r\n\r\n"
    asking = _Lines(head.encode("latin-1", "replace"))
    pool = replicas.pool(f"{parts.scheme}://{parts.netloc}", default_port=443 if parts.scheme == "https" else 80)
    connecting = pool.connect(asking)
    try:
        while True:
            line = await asking.lines.get()
            if isinstance(line, UnavailableError):
                raise UnavailableError(f"cannot read {url}: {line.message}")
            yield line
    finally:
        connecting.cancel()
        if asking.upstream is not None:
            asking.upstream.abandon()
