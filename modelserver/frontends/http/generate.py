"""The generate routes: an input is a key of a JSON object, and an answer one object or a stream of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from modelserver.core.long_work import long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Buffer
from modelserver.errors import UnsupportedError
from modelserver.frontends.http.body import answer_errors, check_size, respond_compressed, with_plain_body
from modelserver.frontends.http.event_stream import AnswerForm, EventStream, document_form, events_form
from modelserver.frontends.http.generate_codec import decode_generate, encode_generate, generate_slices
from modelserver.frontends.http.inference import parse_version
from modelserver.frontends.http.json_body import MAX_BYTES_ON_LOOP
from modelserver.frontends.http.proxy_headers import adopt, reporting
from modelserver.protocol.compression import choose_encoding
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import JSON_TYPE, HttpResponse, error_response

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane


class Generate:
    """Answers `POST /v2/models/{name}[/versions/{version}]/generate` and `.../generate_stream`."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def generate(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        """One object for the only response. Raises ServerError for a request that fails at once."""
        number = parse_version(name, version)
        exchange = reporting(exchange, self._dataplane, name, number)
        headers = exchange.head.headers
        accepted = headers.get("accept-encoding")
        form = document_form(headers.get("accept"))
        make = partial(_OnlyReply, exchange, choose_encoding(accepted) if accepted else None, form)
        self._with_body(exchange, partial(self._submit, exchange, name, number, make))

    def generate_stream(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        """An event for each response. Raises ServerError for a request that fails at once."""
        number = parse_version(name, version)
        exchange = reporting(exchange, self._dataplane, name, number)
        form = events_form(exchange.head.headers.get("accept"))
        make = partial(EventStream, exchange, partial(encode_generate, is_nested=form.is_nested), form)
        self._with_body(exchange, partial(self._submit, exchange, name, number, make))

    def _with_body(self, exchange: HttpExchange, submit: Callable[[Buffer], None]) -> None:
        check_size(exchange.body, self._limits)
        if "content-encoding" in exchange.head.headers:
            with_plain_body(exchange, self._limits, submit)
        else:
            submit(exchange.body)

    def _submit(
        self,
        exchange: HttpExchange,
        name: str,
        version: int | None,
        make_reply: Callable[[], _OnlyReply | EventStream],
        body: Buffer,
    ) -> None:
        config = self._dataplane.model_config(name, version)
        infer = partial(self._infer, exchange, make_reply)
        if len(body) <= MAX_BYTES_ON_LOOP:
            infer(decode_generate(name, version, config, body, self._limits))
        else:
            slices = generate_slices(name, version, config, body, self._limits)
            exchange.on_disconnect = long_work().start(slices, partial(answer_errors, exchange, infer))

    def _infer(
        self, exchange: HttpExchange, make_reply: Callable[[], _OnlyReply | EventStream], request: InFlightRequest
    ) -> None:
        adopt(request, exchange, self._limits.access)
        reply = make_reply()
        request.stream = reply
        reply.request = request
        exchange.on_disconnect = request.cancel
        try:
            self._dataplane.infer(request)
        except BaseException:
            reply.release()
            raise


class _OnlyReply(ResponseStream):
    """Takes a request's responses and answers with the only one; zero or several responses are an error."""

    __slots__ = ("_encoding", "_exchange", "_form", "_held", "request")

    protocol = "HTTP"

    def __init__(self, exchange: HttpExchange, encoding: str | None, form: AnswerForm) -> None:
        super().__init__()
        self._form = form
        self._exchange: HttpExchange | None = exchange
        self._encoding = encoding
        self._held: InferResponse | None = None
        # Set before the request is submitted.
        self.request: InFlightRequest

    def deliver(self, response: InferResponse) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if not response.is_final and self._held is None and response.error is None:
            self._held = response
            return
        request, held = self.request, self._held
        self.release()
        try:
            answer = _answer(request, held, response, self._form)
        except Exception as error:
            if not response.is_final:
                request.cancel()
            answer = error_response(error)
        respond_compressed(exchange, answer, self._encoding)

    def release(self) -> None:
        """Release the exchange, which is answered."""
        self._exchange = self._held = None
        self.request = None  # type: ignore[assignment] # not used any more


def _answer(
    request: InFlightRequest, held: InferResponse | None, last: InferResponse, form: AnswerForm
) -> HttpResponse:
    """The answer, from any earlier response and a response that is final, an error, or one too many."""
    if last.error is not None:
        raise last.error
    is_empty = last.is_final and last.is_empty
    if (held is None) == is_empty:
        raise UnsupportedError(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )
    document = encode_generate(request, last if held is None else held, is_nested=form.is_nested)
    return HttpResponse(200, [JSON_TYPE], (document,))
