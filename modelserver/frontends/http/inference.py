"""The infer route: decode, call the data plane, encode the response, without a Task or a Future."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from modelserver.auth.access import Access, ApiGroup
from modelserver.auth.guard import Needs
from modelserver.core.long_work import Slices, at_once, long_work
from modelserver.core.numerals import is_digits
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Buffer, is_long
from modelserver.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from modelserver.frontends.http.body import answer_errors, check_size, respond_compressed, with_plain_body
from modelserver.frontends.http.codec import OutputForm, encode_infer, encode_infer_event
from modelserver.frontends.http.decoder import InferDecoder, Outline, decode_raw
from modelserver.frontends.http.event_stream import EventStream, events_form
from modelserver.frontends.http.proxy_headers import client_timeout_ns, reporting
from modelserver.frontends.http.templates import Known, RecentCall
from modelserver.planes.authorized import AnyDataPlane
from modelserver.planes.data import InferPlane
from modelserver.protocol.api import Route
from modelserver.protocol.compression import choose_encoding
from modelserver.protocol.exchange import HttpExchange, HttpHead, RouteMemo
from modelserver.protocol.kserve import ASKING_HEADER, JSON_LEN_HEADER
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, error_response

T = TypeVar("T")


def parse_version(name: str, version: str | None) -> int | None:
    """A path's version segment. Raises NotFoundError for anything but a number."""
    if version is None:
        return None
    if not is_digits(version):
        raise NotFoundError(
            f"Request for unknown model: '{name}' version '{version:.40}' is not found; versions are numbers"
        )
    return int(version)


# The requirements of the infer routes.
NEEDS = Needs.of(ApiGroup.INFERENCE)


class InferMemo(RouteMemo):
    """The content of an infer call's head; the `HttpHead.memo` of such calls, so that equal heads are read once.

    `json_len` is the size of the body's JSON part: None when no header gives it, -1 when that is not a size. `is_plain`
    means that only the body matters. `recent` is the last call with this head.
    """

    __slots__ = (
        "accepts_events",
        "accepts_json",
        "answer_encoding",
        "client_timeout_ns",
        "forwarded",
        "is_encoded",
        "is_plain",
        "json_len",
        "name",
        "priority",
        "recent",
        "trace_parent",
        "version",
    )

    def __init__(self, head: HttpHead, name: str, version: str | None, access: Access) -> None:
        """Raises NotFoundError for a version that is not a number, InvalidArgumentError as `Access` does."""
        self.needs = NEEDS
        self.forwarded = access.forwarded(head.headers, head.names)
        self.trace_parent = access.context(head.headers)
        self.client_timeout_ns = client_timeout_ns(head.headers)
        self.priority = access.priority(head.headers)
        self.recent = RecentCall()
        self.name = name
        self.version = parse_version(name, version)
        self.is_encoded = "content-encoding" in head.headers
        accepted = head.headers.get("accept-encoding")
        self.answer_encoding = choose_encoding(accepted) if accepted else None
        media = head.headers.get("accept", "")
        self.accepts_events = "text/event-stream" in media
        self.accepts_json = "application/json" in media
        text = head.headers.get(JSON_LEN_HEADER)
        if text is None:
            self.json_len = None
        else:
            self.json_len = int(text) if is_digits(text) else -1
        names = (
            self.forwarded is not None,
            self.trace_parent,
            access.callers_by,
            self.client_timeout_ns,
            self.priority,
        )
        is_special = self.is_encoded or self.accepts_events or any(names)
        self.is_plain = not is_special and (self.json_len is None or self.json_len > 0)


class Inference:
    """Answers `POST /v2/models/{name}[/versions/{version}]/infer`."""

    def __init__(self, dataplane: InferPlane, limits: HttpLimits, models: AnyDataPlane | None = None) -> None:
        """`models` knows their configs; without it, calls that need one do not come here."""
        self._dataplane = dataplane
        self._models = models
        self._limits = limits
        self._max_body_bytes = limits.max_body_bytes
        self._names_callers = bool(limits.access.callers_by)
        self._infer = dataplane.infer
        self._recall = self.answer
        self._decoder = InferDecoder(limits)
        self._decode = self._decoder.decode_on_loop

    def routes(self) -> tuple[Route, ...]:
        return tuple(
            Route("POST", f"/v2/models/{{name}}{version}/infer", self.infer, ApiGroup.INFERENCE, model="name")
            for version in ("", "/versions/{version}")
        )

    @property
    def _knowing(self) -> AnyDataPlane:
        assert self._models is not None, "a front process passes such calls on"
        return self._models

    def infer(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        """As `answer`, for a head that was not read before."""
        head = InferMemo(exchange.head, name, version, self._limits.access)
        if ASKING_HEADER in exchange.head.headers:
            exchange = reporting(exchange, self._knowing, name, head.version)
        else:
            head.recall = self._recall
            exchange.head.memo = head
        self.answer(exchange, head)

    def answer(self, exchange: HttpExchange, head: InferMemo) -> None:
        """Answers through `exchange`, mostly from the model's callback. Raises ServerError if it fails at once."""
        body = exchange.body
        size = len(body)
        if size > self._max_body_bytes:
            check_size(body, self._limits)
        json_len = head.json_len
        if head.is_plain and (json_len is None or json_len <= size):
            # The usual call, on the hot path: as `_submit`.
            reply = _Reply(exchange, head.answer_encoding)
            try:
                recent = head.recent
                if size == recent.size and type(body) is bytes and body.startswith(recent.text):
                    request = recent.template.fill(head.name, head.version, recent.id, body, len(recent.text), reply)
                    form = recent.form
                else:
                    known = self._decode(head.name, head.version, body, json_len, reply, recent)
                    if known is None:
                        self._decode_long(exchange, head, body)
                        return
                    request, form = known
                reply.request, reply.form = request, form
                self._infer(request)
            except BaseException:
                reply.release()
                raise
            if reply.exchange is not None:
                exchange.on_disconnect = request.cancel
        elif head.is_encoded:
            with_plain_body(exchange, self._limits, partial(self._submit, exchange, head))
        else:
            self._submit(exchange, head, body)

    def _submit(self, exchange: HttpExchange, head: InferMemo, body: Buffer) -> None:
        json_len = head.json_len
        if json_len is not None and not 0 <= json_len <= len(body):
            raise _wrong_json_len(exchange.head.headers[JSON_LEN_HEADER], len(body))
        is_for_events = head.accepts_events and self._sends_events(head)
        known: Known | None
        if json_len == 0:
            known = self._decode_raw(head, body), OutputForm(is_binary=True)
        else:
            known = self._decode(head.name, head.version, body, json_len, ResponseStream())
        if known is None:
            self._decode_long(exchange, head, body, is_for_events=is_for_events)
        else:
            self._infer_decoded(exchange, head, known, is_for_events=is_for_events)

    def _decode_long(
        self, exchange: HttpExchange, head: InferMemo, body: Buffer, *, is_for_events: bool = False
    ) -> None:
        """As `_submit`, for a call that is decoded beside the event loop."""
        work = long_work()
        decoder = self._decoder
        infer = partial(self._infer_decoded, exchange, head, is_for_events=is_for_events)

        def decode_elements(outline: Outline) -> None:
            self._dataplane.check_inputs(outline.request)
            start(decoder.elements(outline, body), infer)

        def start(slices: Slices[T], then: Callable[[T], None]) -> None:
            exchange.on_disconnect = work.start(slices, partial(answer_errors, exchange, then))

        start(decoder.outline(head.name, head.version, body, head.json_len), decode_elements)

    def _infer_decoded(self, exchange: HttpExchange, head: InferMemo, known: Known, *, is_for_events: bool) -> None:
        request, form = known
        reply: _Reply | EventStream
        if is_for_events:
            # Unlike Triton: an event for each response, with the document of an infer answer.
            if form.is_binary or (form.listed and any(form.listed.values())):
                raise InvalidArgumentError("events are text: outputs cannot be binary, ask for them as JSON")
            reply = EventStream(exchange, encode_infer_event, events_form(exchange.head.headers.get("accept")))
        else:
            reply = _Reply(exchange, head.answer_encoding)
            reply.form = form
            if head.trace_parent:
                request.join_trace(head.trace_parent)
        request.stream = reply
        reply.request = request
        if head.forwarded is not None:
            request.forward(head.forwarded)
        if self._names_callers:
            request.caller = self._limits.access.caller(exchange.head.headers, exchange.peer)
        if head.client_timeout_ns:
            request.deadline_ns = time.monotonic_ns() + head.client_timeout_ns
        request.priority = request.priority or head.priority
        exchange.on_disconnect = request.cancel
        try:
            self._dataplane.infer(request)
        except BaseException:
            reply.release()
            raise

    def _sends_events(self, head: InferMemo) -> bool:
        """Whether the answer is a stream of events: of a decoupled model, or for a client that accepts nothing else."""
        return not head.accepts_json or self._knowing.model_config(head.name, head.version).is_decoupled

    def _decode_raw(self, head: InferMemo, body: Buffer) -> InFlightRequest:
        config = self._knowing.model_config(head.name, head.version)
        metadata = self._knowing.model_metadata(head.name, head.version)
        return decode_raw(metadata, head.version, body, is_batched=config.max_batch_size > 0)


def _wrong_json_len(text: str, body_len: int) -> InvalidArgumentError:
    if not (text.isascii() and text.isdigit()):
        return InvalidArgumentError(
            f"Unable to parse Inference-Header-Content-Length, got: {text:.40}; it must be a number of bytes"
        )
    return InvalidArgumentError(
        f"inference header size should be in range (0, {body_len}), got: {text:.40}; it is the header "
        "Inference-Header-Content-Length"
    )


def _respond(exchange: HttpExchange, encoding: str | None, answer: HttpResponse) -> None:
    if encoding is None:
        exchange.respond(answer)
    else:
        respond_compressed(exchange, answer, encoding)


class _Reply(ResponseStream):
    """Takes a request's responses and answers with the only one.

    A decoupled model may send its response first and an empty final one later: the answer waits for the end, because
    this call cannot carry a second response, or none at all.
    """

    __slots__ = ("_encoding", "_held", "exchange", "form", "request")

    protocol = "HTTP"

    def __init__(self, exchange: HttpExchange, encoding: str | None) -> None:
        self.on_read = None  # the stream's other state is for readers, and this stream reads itself
        self.exchange: HttpExchange | None = exchange  # None once the answer was given
        self._encoding = encoding
        self._held: InferResponse | None = None
        # Set before the request is submitted.
        self.request: InFlightRequest
        self.form: OutputForm

    def deliver(self, response: InferResponse) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if not response.is_final and self._held is None and response.error is None:
            self._held = response
            return
        request, form = self.request, self.form
        self.exchange = None  # as `release`
        self.request = self.form = None  # type: ignore[assignment]  # not used any more
        try:
            if response.error is None and response.outputs and response.is_final and self._held is None:
                if is_long(response.outputs, as_text=not form.is_binary):
                    encode = at_once(partial(encode_infer, request, response, form))
                    exchange.on_disconnect = long_work().start(
                        encode, partial(answer_errors, exchange, partial(_respond, exchange, self._encoding))
                    )
                    return
                answer = encode_infer(request, response, form)  # the usual one
            else:
                answer = self._answer(request, form, response)
            if self._encoding is None:
                exchange.respond(answer)
            else:
                respond_compressed(exchange, answer, self._encoding)
        except Exception as error:
            exchange.respond(error_response(error))

    def release(self) -> None:
        """Release the call, which is answered.

        The request has this object as its stream: a cycle would keep its tensors in memory until the garbage collector
        runs.
        """
        self.exchange = None
        self.request = self.form = None  # type: ignore[assignment]  # not used any more

    def _answer(self, request: InFlightRequest, form: OutputForm, response: InferResponse) -> HttpResponse:
        """The answer, given a response that is final, an error, or one too many."""
        if response.error is not None:
            return error_response(response.error)
        if self._held is None and not (request.is_decoupled and response.is_empty):
            return encode_infer(request, response, form)
        if self._held is not None and response.is_final and response.is_empty:
            return encode_infer(request, self._held, form)
        request.cancel()
        raise UnsupportedError(
            "HTTP end point doesn't support models with decoupled transaction policy: model "
            f"'{request.model_name}' sent {'no' if self._held is None else 'more than one'} response, which has to be "
            "exactly one; send 'Accept: text/event-stream', or use generate_stream or gRPC's ModelStreamInfer"
        )
