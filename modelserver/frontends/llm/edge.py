"""One call: its JSON, its answer, and the edge at which its errors get the API's words."""

from __future__ import annotations

import asyncio
import logging
import secrets
import string
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from modelserver.auth.access import ApiGroup
from modelserver.auth.guard import Needs, check_further
from modelserver.core.json_pieces import text_slices
from modelserver.core.long_work import long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Buffer
from modelserver.errors import LoadOnDemandError, UnsupportedError
from modelserver.frontends.http.body import MAX_BYTES_ON_LOOP, check_size, object_slices, parse_object
from modelserver.frontends.http.framing import Frames, Framing, respond_document, respond_text
from modelserver.frontends.http.proxy_headers import adopt
from modelserver.frontends.llm.errors import ApiErrors, MediaTypeError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import load_on_demand
from modelserver.frontends.llm.pictures import PictureUrls
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.compression import decompress
from modelserver.protocol.exchange import HttpExchange, ResponseWriter
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, json_response

logger = logging.getLogger(__name__)

# Of a document: two milliseconds at worst.
MAX_BYTES_WRITTEN_ON_LOOP = 1 << 20
_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.")
_MAX_ID_LEN = 128


class Call:
    """A request with a body that is a JSON object, on its way to be answered whole or by a stream."""

    def __init__(
        self,
        exchange: HttpExchange,
        limits: HttpLimits,
        document: dict[str, Any],
        *,
        errors: ApiErrors,
        framing: Framing,
        num_bytes: int = 0,
    ) -> None:
        """`num_bytes` is the size of the body, unpacked. `headers` are further ones of the answer, until it begins."""
        self._exchange = exchange
        self._access = limits.access
        self._errors = errors
        self.picture_urls = PictureUrls(limits.media_domains)
        self.framing = framing
        self.headers: list[tuple[str, str]] = []
        self._writer: ResponseWriter | None = None
        self.fields = Fields(document)
        self.created_s = int(time.time())
        self.num_bytes = num_bytes

    def query(self, name: str) -> str:
        """A value of the query; empty if it is not there."""
        return query_value(self._exchange.head.query, name)

    def make_id(self, prefix: str) -> str:
        """A new id, or the prefix with the one that the client gave (`request_id`, X-Request-Id)."""
        given = self.fields.text("request_id") or self._exchange.head.headers.get("x-request-id", "")
        if given and len(given) <= _MAX_ID_LEN and _ID_CHARACTERS.issuperset(given):
            return prefix + given
        return prefix + secrets.token_hex(16)

    def adopt(self, request: InFlightRequest) -> InFlightRequest:
        """Pass on what the call's headers say, and return the request."""
        return adopt(request, self._exchange, self._access)

    def check_access(self, group: ApiGroup) -> None:
        """Raise PermissionDeniedError unless the caller may also make calls of this group."""
        check_further(self._access, Needs.of(group), self._exchange.head.headers)

    def answer(self, document: object) -> None:
        """Answer whole."""
        respond_document(self._exchange, document, self.headers)

    async def answer_beside(self, document: object, num_bytes: int) -> None:
        """Answer whole by a document of about that many bytes; a long one is written beside the event loop."""
        if num_bytes <= MAX_BYTES_WRITTEN_ON_LOOP:
            self.answer(document)
        else:
            self.answer_text(*await long_work().run(text_slices(document)))

    def answer_plain(self, text: str) -> None:
        """Answer with plain text."""
        headers = [("Content-Type", "text/plain; charset=utf-8"), *self.headers]
        self._exchange.respond(HttpResponse(200, headers, (text.encode(),)))

    def answer_text(self, *parts: Buffer) -> None:
        """Answer with a document that is JSON text already, in parts."""
        respond_text(self._exchange, parts, self.headers)

    def send(self, frames: Frames) -> bool:
        """Send frames of a stream; the first begin the answer. False asks for `wait_for_room` before the next ones.

        Raises ConnectionError when the client has left.
        """
        writer = self._writer or self._begun()
        if isinstance(frames, bytes):
            return writer.send(frames)
        has_room = True
        for part in frames:
            has_room = writer.send(part)
        return has_room

    async def wait_for_room(self) -> None:
        """Return when the client has room for more. Raises ConnectionError when it has left."""
        if self._writer is not None:
            await self._writer.wait_for_room()

    async def finish(self, frames: Frames = b"") -> None:
        """End a stream, with these frames before its end."""
        writer = self._begun()
        if not isinstance(frames, bytes):
            self.send(frames)
            frames = b""
        await writer.write(frames + self.framing.end)
        await writer.close()

    async def fail(self, error: Exception) -> None:
        """Answer with an error: by its status, or as the last frame of a stream that has begun."""
        error = self._errors.placed(error, self.fields.document)
        if self._writer is None:
            self._exchange.respond(self._errors.failed(error))
            return
        await self._writer.write(self.framing.error(self._errors.document(error)))
        await self._writer.close()

    def abort(self) -> None:
        """Break off an answer that has begun, in a way that tells the client that it is not complete."""
        if self._writer is not None:
            self._writer.abort()

    @property
    def is_begun(self) -> bool:
        """Whether a stream has begun, whose status cannot change any more."""
        return self._writer is not None

    def _begun(self) -> ResponseWriter:
        if self._writer is None:
            self._writer = self._exchange.start(200, [*self.framing.headers, *self.headers])
        return self._writer


Serve = Callable[[Call], Awaitable[None]]


def query_value(query: str, name: str) -> str:
    """A value of a query; empty if it is not there."""
    return parse_qs(query).get(name, [""])[-1] if query else ""


class CallEdge:
    """Turns functions that serve calls into handlers of routes: each call has a Task of its own.

    `errors` and `framing` are the API's: how its errors look, and its streams. With `takes_any_type` a body need not
    say that it is JSON: curl does not. Pages of other origins, which a browser names in `Origin`, must say so, because
    the browser then asks first whether they may.
    """

    def __init__(
        self,
        dataplane: AnyDataPlane,
        limits: HttpLimits,
        *,
        errors: ApiErrors,
        framing: Framing,
        takes_any_type: bool = False,
    ) -> None:
        self._takes_any_type = takes_any_type
        self._dataplane = dataplane
        self._limits = limits
        self._errors = errors
        self._framing = framing
        self._tasks: set[asyncio.Task[None]] = set()  # kept, because the event loop does not

    def handler(self, serve: Serve) -> Callable[[HttpExchange], None]:
        """A handler that reads the body, calls `serve` and answers what that raises."""
        return partial(self._begin, serve)

    async def read(self, exchange: HttpExchange, limits: HttpLimits) -> tuple[dict[str, Any], int]:
        """The document of a call, and the size of its body. An API whose bodies are not JSON overrides this."""
        if not self._takes_any_type or "origin" in exchange.head.headers:
            _check_media_type(exchange)
        body = await plain_body(exchange, limits)
        return await _document(body, limits), len(body)

    def _begin(self, serve: Serve, exchange: HttpExchange) -> None:
        task = asyncio.get_running_loop().create_task(self._run(serve, exchange), name="llm-call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A client that leaves ends the task, and the task's end cancels what it asked of models.
        exchange.on_disconnect = task.cancel  # type: ignore[assignment]  # its result is ignored

    async def _run(self, serve: Serve, exchange: HttpExchange) -> None:
        call: Call | None = None
        try:
            document, num_bytes = await self.read(exchange, self._limits)
            call = Call(
                exchange,
                self._limits,
                document,
                errors=self._errors,
                framing=self._framing,
                num_bytes=num_bytes,
            )
            try:
                await serve(call)
            except LoadOnDemandError as unloaded:  # raised before anything was asked of the model
                await load_on_demand(self._dataplane, call.fields.text("model") or "", unloaded)
                await serve(call)
        except ConnectionError:
            logger.debug("the client of %s left", exchange.head.path)
        except Exception as error:
            await self._fail(call, exchange, error)
            _forget_frames(error)

    async def _fail(self, call: Call | None, exchange: HttpExchange, error: Exception) -> None:
        if call is None:
            exchange.respond(self._errors.failed(error))
            return
        try:
            await call.fail(error)
        except ConnectionError:
            logger.debug("the client of %s left before its error", exchange.head.path)


class LaterAnswers:
    """Answers calls without a body by documents that are made in a Task of their own; `errors` is the API's form."""

    def __init__(self, errors: ApiErrors) -> None:
        self._errors = errors
        self._tasks: set[asyncio.Task[None]] = set()  # kept, because the event loop does not

    def begin(
        self,
        exchange: HttpExchange,
        document: Coroutine[Any, Any, dict[str, Any] | HttpResponse],
        *,
        outlives_client: bool = False,
    ) -> None:
        """Answer when the document, or a whole answer, is made.

        Making it ends with its client, unless others may wait for the same.
        """
        task = asyncio.get_running_loop().create_task(self._respond(exchange, document), name="llm-document")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not outlives_client:
            exchange.on_disconnect = task.cancel  # type: ignore[assignment]  # its result is ignored

    async def _respond(
        self, exchange: HttpExchange, document: Coroutine[Any, Any, dict[str, Any] | HttpResponse]
    ) -> None:
        try:
            made = await document
            response = made if isinstance(made, HttpResponse) else json_response(made)
        except Exception as error:
            response = self._errors.failed(error)
        exchange.on_disconnect = None
        exchange.respond(response)


def _check_media_type(exchange: HttpExchange) -> None:
    """Raise MediaTypeError for a body that says it is something else than JSON."""
    given = exchange.head.headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(
            f"the body must be application/json, the header Content-Type says '{given:.100}' (with curl use --json)"
        )


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that was answered, and of those before it.

    Their frames hold the request, and one of them a response with the error: a cycle that would keep long prompts in
    memory until the garbage collector runs.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


async def _document(body: Buffer, limits: HttpLimits) -> dict[str, Any]:
    """The JSON object of a call. A long one is parsed beside the event loop."""
    if len(body) <= MAX_BYTES_ON_LOOP:
        return parse_object(body, limits)
    return await long_work().run(object_slices(body, limits))


async def plain_body(exchange: HttpExchange, limits: HttpLimits) -> Buffer:
    """The body without its Content-Encoding. Raises PayloadTooLargeError and what `decompress` raises."""
    body = exchange.body
    check_size(body, limits)
    encoding = exchange.head.headers.get("content-encoding")
    if encoding is None:
        return body
    work = partial(decompress, body, encoding, limits.max_body_bytes)
    try:
        return await long_work().compute(work)
    except UnsupportedError as error:
        raise MediaTypeError(error.message) from error
