"""The infer route: decode, call the data plane, encode what comes back. No Task and no Future on its way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from modelserver.frontends.http.body import check_size, respond_compressed, with_plain_body
from modelserver.frontends.http.codec import OutputForm, decode_infer, encode_infer
from modelserver.frontends.http.exchange import HttpExchange, HttpResponse
from modelserver.frontends.http.head import HeadReader
from modelserver.frontends.http.limits import HttpLimits
from modelserver.frontends.http.raw_body import decode_raw
from modelserver.frontends.http.status import error_response

if TYPE_CHECKING:
    from modelserver.dataplane import DataPlane

_HEADER_LENGTH = "inference-header-content-length"


def parse_version(name: str, version: str | None) -> int | None:
    """A path's version segment. Raises NotFoundError for what is not a number, since versions are numbers."""
    if version is None:
        return None
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise NotFoundError(
            f"Request for unknown model: '{name}' version '{version:.40}' is not found; versions are numbers"
        )
    return int(version)


class Inference:
    """Answers `POST /v2/models/{name}[/versions/{version}]/infer`."""

    def __init__(self, dataplane: DataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits
        self._heads = HeadReader(limits)

    def infer(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        """Answers through `exchange`, mostly from the model's callback. Raises ServerError for what fails at once."""
        number = None if version is None else parse_version(name, version)
        check_size(exchange.body, self._limits)
        if "content-encoding" in exchange.head.headers:
            with_plain_body(exchange, self._limits, partial(self._submit, exchange, name, number))
        else:
            self._submit(exchange, name, number, exchange.body)

    def _submit(self, exchange: HttpExchange, name: str, version: int | None, body: Buffer) -> None:
        text = exchange.head.headers.get(_HEADER_LENGTH)
        header_length = None if text is None else _parse_header_length(text, len(body))
        if header_length == 0:
            request, form = self._decode_raw(name, version, body), OutputForm(is_binary=True)
        else:
            request, form = decode_infer(name, version, body, header_length, self._heads)
        stream = self._dataplane.infer(request)
        exchange.on_disconnect = request.cancel
        stream.subscribe(_Reply(exchange, request, form))

    def _decode_raw(self, name: str, version: int | None, body: Buffer) -> InferRequest:
        config = self._dataplane.model_config(name, version)
        metadata = self._dataplane.model_metadata(name, version)
        return decode_raw(metadata, version, body, is_batched=config.max_batch_size > 0)


def _parse_header_length(text: str, body_len: int) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgumentError(
            f"the header Inference-Header-Content-Length must be a number of bytes, got '{text:.40}'"
        )
    length = int(text) if len(text) < 19 else body_len + 1
    if length > body_len:
        raise InvalidArgumentError(
            f"the header Inference-Header-Content-Length must be from 0 to the body's {body_len}, got {text:.40}"
        )
    return length


class _Reply:
    """Receives a request's responses and answers with the only one.

    A decoupled model may send its response first and an empty final one later: the answer waits for the
    end, because a second response means that this call cannot carry them.
    """

    __slots__ = ("_call", "_held")

    def __init__(self, exchange: HttpExchange, request: InferRequest, form: OutputForm) -> None:
        # None once answered: the request's stream holds this object, and a cycle through the request would
        # keep its tensors in memory until the garbage collector comes by.
        self._call: tuple[HttpExchange, InferRequest, OutputForm] | None = (exchange, request, form)
        self._held: InferResponse | None = None

    def __call__(self, response: InferResponse) -> None:
        if self._call is None:
            return
        exchange, request, form = self._call
        if self._held is None and not response.is_final and response.error is None:
            self._held = response
            return
        self._call = None
        try:
            respond_compressed(exchange, self._answer(request, form, response))
        except Exception as error:
            exchange.respond(error_response(error))

    def _answer(self, request: InferRequest, form: OutputForm, response: InferResponse) -> HttpResponse:
        """The answer, given a response that is final, an error, or one too many."""
        if response.error is not None:
            return error_response(response.error)
        if self._held is None:
            return encode_infer(request, response, form)
        if response.is_final and not response.outputs:
            return encode_infer(request, self._held, form)
        request.cancel()
        raise UnsupportedError(f"model '{request.model_name}' sent more than one response; use gRPC's ModelStreamInfer")
