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
from modelserver.frontends.http.exchange import HttpExchange
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

    def infer(self, exchange: HttpExchange, name: str, version: str | None = None) -> None:
        """Answers through `exchange`, mostly from the model's callback. Raises ServerError for what fails at once."""
        number = None if version is None else parse_version(name, version)
        check_size(exchange.request, self._limits)
        if "content-encoding" in exchange.request.headers:
            with_plain_body(exchange, self._limits, partial(self._submit, exchange, name, number))
        else:
            self._submit(exchange, name, number, exchange.request.body)

    def _submit(self, exchange: HttpExchange, name: str, version: int | None, body: Buffer) -> None:
        text = exchange.request.headers.get(_HEADER_LENGTH)
        header_length = None if text is None else _parse_header_length(text, len(body))
        if header_length == 0:
            request, form = self._decode_raw(name, version, body), OutputForm(is_binary=True)
        else:
            request, form = decode_infer(name, version, body, header_length, self._limits)
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

    __slots__ = ("_exchange", "_form", "_held", "_is_answered", "_request")

    def __init__(self, exchange: HttpExchange, request: InferRequest, form: OutputForm) -> None:
        self._exchange = exchange
        self._request = request
        self._form = form
        self._held: InferResponse | None = None
        self._is_answered = False

    def __call__(self, response: InferResponse) -> None:
        if self._is_answered:
            return
        held = self._held
        try:
            if response.error is not None:
                raise response.error
            is_empty = response.is_final and not response.outputs
            if held is not None and not is_empty:
                self._request.cancel()
                raise UnsupportedError(
                    f"model '{self._request.model_name}' sent more than one response; use gRPC's ModelStreamInfer"
                )
            if not response.is_final:
                self._held = response
                return
            self._is_answered = True
            respond_compressed(self._exchange, encode_infer(self._request, held or response, self._form))
        except Exception as error:
            self._is_answered = True
            self._exchange.respond(error_response(error))
