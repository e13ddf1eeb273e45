"""Responses of one request as server-sent events: an event for each, as fast as the client reads.

`Accept: text/event-stream; events=named; end=done; tensors=nested` states preferences of clients of `generate` and of
event streams. Unknown parameters are ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import orjson

from modelserver.core.long_work import at_once, long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import is_long
from modelserver.errors import ServerError
from modelserver.frontends.http.framing import SSE, SSE_DONE
from modelserver.protocol.exchange import HttpExchange, ResponseWriter
from modelserver.protocol.response import STATUS, error_text

_EVENTS = "text/event-stream"
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """`is_named`: events have names, `response` or `error`. `has_end`: the last one is `[DONE]`.

    `is_nested`: outputs of generate calls are nested by their shapes, instead of flat or a bare value.
    """

    is_named: bool = False
    has_end: bool = False
    is_nested: bool = False


PLAIN = AnswerForm()


def events_form(accept: str | None) -> AnswerForm:
    """The form of a stream of events."""
    return _read(accept, _EVENTS) if accept and ";" in accept else PLAIN


def document_form(accept: str | None) -> AnswerForm:
    """The form of a JSON document."""
    return _read(accept, _JSON) if accept and ";" in accept else PLAIN


@lru_cache(maxsize=64)
def _read(accept: str, media: str) -> AnswerForm:
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name == media:
            wishes = {parameter.replace(" ", "").replace('"', "") for parameter in parameters}
            return AnswerForm("events=named" in wishes, "end=done" in wishes, "tensors=nested" in wishes)
    return PLAIN


logger = logging.getLogger(__name__)

_NAMED_END = b"event: done\n" + SSE_DONE.end

# A response without an error as one line of JSON. Errors that it raises become error events.
EncodeEvent = Callable[[InFlightRequest, InferResponse], bytes]


class EventStream(ResponseStream):
    """Takes a request's responses, and begins the answer with the first: that decides its status.

    Later errors are events with the key `error`. Responses that arrive in one turn of the event loop are written
    together. An empty final response ends the stream without an event, or with `[DONE]` if `form` asks for it. When the
    client leaves, the request is cancelled. Event loop thread only.
    """

    __slots__ = (
        "_encode",
        "_exchange",
        "_form",
        "_is_writing",
        "_num_unread",
        "_task",
        "_unwritten",
        "_writer",
        "request",
    )

    protocol = "HTTP"

    reads_later = True

    def __init__(self, exchange: HttpExchange, encode: EncodeEvent, form: AnswerForm = PLAIN) -> None:
        super().__init__()
        self._form = form
        self._exchange: HttpExchange | None = exchange
        self._encode = encode
        self._unwritten: list[InferResponse] = []
        self._writer: ResponseWriter | None = None
        self._is_writing = False
        # Responses that were sent, and count as read when the client has room for another one.
        self._num_unread = 0
        # Writes when the client has no room, and ends the answer. Kept, because the event loop does not keep tasks.
        self._task: asyncio.Task[None] | None = None
        # Set before the request is submitted.
        self.request: InFlightRequest

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.is_finished = response.is_final
        if self._exchange is None:
            self.has_read()  # there is no reader
            return
        self._unwritten.append(response)
        if not self._is_writing:
            self._is_writing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write the responses of a turn of the event loop together, without a Task if that can be done at once."""
        responses = self._unwritten
        if self._exchange is None:
            return  # the client has left
        if self.is_finished or any(is_long(response.outputs, as_text=True) for response in responses):
            self._start_task()
            return
        try:
            data = b"".join([self._event(response) for response in responses])
            has_room = self._begun(responses[0]).send(data)
        except ConnectionError:
            self._give_up()
        except Exception:
            self._start_task()  # it finds the same error, and ends the answer
        else:
            self._unwritten = []
            if has_room:
                self._is_writing = False
                for _ in responses:
                    self.has_read()
            else:
                self._num_unread = len(responses)
                self._start_task()

    def _start_task(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write(), name="event-stream")

    def release(self) -> None:
        """Release the exchange, which is answered; nothing more is written."""
        self._exchange = self._writer = None
        self.request = None  # type: ignore[assignment] # not used any more

    async def _write(self) -> None:
        """Write the responses that wait once the client has room, and end the answer after the final one."""
        try:
            if self._num_unread and self._writer is not None:
                await self._writer.wait_for_room()
                for _ in range(self._num_unread):
                    self.has_read()
                self._num_unread = 0
            while self._unwritten:
                responses, self._unwritten = self._unwritten, []
                await self._write_events(responses)
            self._is_writing = False
            if self.is_finished and self._writer is not None:
                if self._form.has_end:
                    await self._writer.write(_NAMED_END if self._form.is_named else SSE_DONE.end)
                await self._writer.close()
                self.release()
        except ConnectionError:
            self._give_up()
        except Exception:
            logger.exception("a stream of events failed")
            if self._writer is not None:
                await self._writer.close()
            self._give_up()

    async def _write_events(self, responses: list[InferResponse]) -> None:
        events = []
        for response in responses:
            if is_long(response.outputs, as_text=True):
                events.append(await long_work().run(at_once(partial(self._event, response))))
            else:
                events.append(self._event(response))
        writer = self._begun(responses[0])
        data = b"".join(events)
        if data:
            await writer.write(data)
        for _ in responses:
            self.has_read()

    def _begun(self, first: InferResponse) -> ResponseWriter:
        """The writer of the answer, which `first` begins if it is the first response."""
        if self._writer is None:
            assert self._exchange is not None, "nothing is written after the end"
            status = 200 if first.error is None else STATUS[first.error.code]
            self._writer = self._exchange.start(status, SSE.headers)
        return self._writer

    def _event(self, response: InferResponse) -> bytes:
        if response.is_final and response.is_empty:
            return b""
        error = response.error
        if error is None:
            try:
                return SSE.frame(self._encode(self.request, response), "response" if self._form.is_named else "")
            except ServerError as refusal:
                error = refusal
        document = orjson.dumps({"error": error_text(error.message)})
        return SSE.frame(document, "error" if self._form.is_named else "")

    def _give_up(self) -> None:
        """The client has left: later responses are dropped."""
        request = self.request
        self._unwritten.clear()
        self.release()
        request.cancel()
