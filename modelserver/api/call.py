"""What an installed API gets: a context for its factory, and calls with a body, an answer, and models to ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import orjson

from modelserver.auth.api_keys import Scope
from modelserver.core.datatype import Datatype
from modelserver.core.long_work import long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ParameterValue, ResponseStream
from modelserver.core.tensor import Buffer, Tensor
from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.frontends.http.body import check_size, object_slices, respond_compressed
from modelserver.frontends.http.proxy_headers import adopt
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane, ask, only
from modelserver.protocol.api import Api, RouteCall
from modelserver.protocol.compression import SUPPORTED, choose_encoding, decompress
from modelserver.protocol.exchange import HttpExchange, HttpHead, ResponseWriter
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import JSON_TYPE, ErrorWriter, HttpResponse

logger = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray[Any, Any]]
_EVENT_HEADERS: Final = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
)


class Call:
    """A request on its way to be answered once: whole, by `answer` or `respond`, or by events, by `send`.

    `arguments` are the values of the pattern's `{name}` segments. Used in the call's own Task, which is cancelled when
    the client leaves: whatever it asked of models is cancelled with it.
    """

    def __init__(
        self, exchange: HttpExchange, arguments: Mapping[str, str], dataplane: AnyDataPlane, limits: HttpLimits
    ) -> None:
        self.arguments = arguments
        self._exchange = exchange
        self._dataplane = dataplane
        self._limits = limits
        self._writer: ResponseWriter | None = None
        self._is_answered = False

    @property
    def head(self) -> HttpHead:
        """Method, path, query and headers."""
        return self._exchange.head

    # The body.

    async def body(self) -> Buffer:
        """The body without its Content-Encoding.

        Raises PayloadTooLargeError, UnsupportedError for an unknown encoding, InvalidArgumentError for broken data.
        """
        body = self._exchange.body
        check_size(body, self._limits)
        encoding = self.head.headers.get("content-encoding")
        if encoding is None:
            return body
        work = partial(decompress, body, encoding, self._limits.max_body_bytes)
        return await long_work().compute(work)

    async def json(self) -> dict[str, Any]:
        """The body as a JSON object, empty where there is no body. A long one is parsed beside the event loop.

        Raises as `body`, and InvalidArgumentError for what is not a JSON object.
        """
        return await long_work().run(object_slices(await self.body(), self._limits))

    # The answer.

    def answer(self, document: object, status: int = 200) -> None:
        """Answer with a JSON document, compressed if the client prefers that."""
        self.respond(HttpResponse(status, [JSON_TYPE], (orjson.dumps(document),)))

    def respond(self, response: HttpResponse) -> None:
        """Answer with anything else."""
        self._begin_answer()
        accepted = self.head.headers.get("accept-encoding")
        respond_compressed(self._exchange, response, choose_encoding(accepted) if accepted else None)

    async def send(self, document: object, *, event: str = "") -> None:
        """Send a server-sent event, with a name if it has one; the first one begins the answer.

        Returns when the client has room for more. Raises ConnectionError when it has left.
        """
        if self._writer is None:
            self._begin_answer()
            self._writer = self._exchange.start(200, list(_EVENT_HEADERS))
        await self._writer.write(_event(orjson.dumps(document), event))

    async def write(self, data: bytes, *, content_type: str = "application/octet-stream") -> None:
        """Send a piece of any other answer; the first one begins the answer. Waits and raises as `send`."""
        if self._writer is None:
            self._begin_answer()
            self._writer = self._exchange.start(200, [("Content-Type", content_type)])
        await self._writer.write(data)

    async def finish(self) -> None:
        """End an answer in pieces. Called when the handler returns. Raises RuntimeError when it did not answer."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.close()
        elif not self._is_answered:
            raise RuntimeError(f"the handler of {self.head.path:.200} returned without an answer")

    async def fail(self, response: HttpResponse) -> None:
        """Answer with an error, or, where the answer has begun, end it with the error as the event `error`."""
        if self._writer is not None:
            await self._writer.write(_event(b"".join(response.body), "error"))
            await self.finish()
        elif not self._is_answered:
            self.respond(response)

    def _begin_answer(self) -> None:
        if self._is_answered:
            raise RuntimeError(f"the handler of {self.head.path:.200} answers twice")
        self._is_answered = True

    # Models.

    async def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: int | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """The outputs of a model that answers once, by their names.

        Arrays have the shapes and types of the model's metadata, with the batch dimension; text is bytes in an array of
        objects. Raises the ServerError that the model or the server refuses the request with.
        """
        responses = self.stream(model, inputs, version=version, parameters=parameters)
        return await only(model, responses, "Call.stream")

    async def stream(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: int | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> AsyncGenerator[dict[str, np.ndarray[Any, Any]], None]:
        """The outputs of each response of a model, as they come. Raises as `infer`.

        A model that can wait does so while the loop's body is busy. Leaving the loop early cancels the request.
        """
        responses = ask(self._dataplane, lambda: self._request(model, inputs, version, parameters))
        async with aclosing(responses):
            async for outputs in responses:
                yield {tensor.name: tensor.data for tensor in outputs}

    def _request(
        self, model: str, inputs: Arrays, version: int | None, parameters: Mapping[str, ParameterValue] | None
    ) -> InFlightRequest:
        """With what the call's headers say."""
        tensors = {name: _tensor(name, data) for name, data in inputs.items()}
        request = InFlightRequest(
            model_name=model, version=version, inputs=tensors, parameters=parameters or {}, stream=_Stream()
        )
        return adopt(request, self._exchange, self._limits.access)


# Serves a call: answers it, or raises.
Serve = Callable[[Call], Awaitable[None]]


class _Stream(ResponseStream):
    """The responses of one request, which the call's Task reads."""

    __slots__ = ()

    protocol = "HTTP"
    reads_later = True


def _tensor(name: str, data: np.ndarray[Any, Any]) -> Tensor:
    try:
        datatype = Datatype.from_numpy(data.dtype)
    except KeyError:
        raise InvalidArgumentError(f"input '{name}': no datatype carries arrays of {data.dtype}") from None
    return Tensor(name, datatype, data)


def _event(data: bytes, name: str) -> bytes:
    lines = b"".join(b"data: %b\n" % line for line in data.splitlines() or [b""])
    return (f"event: {name}\n".encode() if name else b"") + lines + b"\n"


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The server as an API sees it. Everything is called on the event loop thread.

    `name` is that of the entry point, and must be that of the `Api`. The planes check the models of a caller's key by
    themselves. `limits` bound what a request may ask.
    """

    name: str
    dataplane: AnyDataPlane
    controlplane: AnyControlPlane
    limits: HttpLimits = field(default_factory=HttpLimits)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # kept, because the event loop does not

    def scope(self, word: str) -> Scope:
        """A scope of this API's own: keys have it as `name:word`. `word` is of a-z, 0-9 and -."""
        return Scope(f"{self.name}:{word}")

    def handler(self, serve: Serve, errors: ErrorWriter) -> RouteCall:
        """The handler of a route: `serve` is awaited with a `Call`, in a Task that ends when the client leaves.

        What `serve` raises is answered in the form of `errors`. A call that it leaves unanswered is a fault of ours.
        """
        return partial(self._begin, serve, errors)

    def _begin(self, serve: Serve, errors: ErrorWriter, exchange: HttpExchange, **arguments: str) -> None:
        call = Call(exchange, arguments, self.dataplane, self.limits)
        task = asyncio.get_running_loop().create_task(_run(serve, errors, call), name=f"{self.name}-call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()

        exchange.on_disconnect = leave


ApiFactory = Callable[[ApiContext], Api]


async def _run(serve: Serve, errors: ErrorWriter, call: Call) -> None:
    try:
        try:
            await serve(call)
            await call.finish()
        except ConnectionError:
            raise
        except Exception as error:
            response = errors.failed(error)
            if isinstance(error, UnsupportedError) and "content-encoding" in call.head.headers:
                response.headers = [*response.headers, ("Accept-Encoding", SUPPORTED)]
            await call.fail(response)
    except ConnectionError:
        logger.debug("the client of %s left", call.head.path)
