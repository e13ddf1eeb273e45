"""From a ModelInferRequest to a request: by a template if it is known, in full otherwise."""

from __future__ import annotations

from modelserver.core.long_work import Slices, finish
from modelserver.core.request import InFlightRequest
from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError
from modelserver.frontends.grpc.codec import (
    LongRequest,
    Outline,
    decode_on_loop,
    element_slices,
    known_id,
    outline_slices,
    request_names,
)
from modelserver.frontends.grpc.templates import Templates
from modelserver.protocol.limits import GrpcLimits


class InferDecoder:
    """Decodes requests within `limits`. Event loop thread only."""

    def __init__(self, limits: GrpcLimits) -> None:
        self._limits = limits
        self._templates = Templates(is_on=limits.recognizes)

    def decode(self, message: Buffer, stream: ResponseStream) -> InFlightRequest:
        """The request, whose responses go to `stream`. Raises ServerError for every fault in it."""
        decoded = self.decode_on_loop(message, stream)
        if isinstance(decoded, LongRequest):
            decoded = finish(self.outline_slices(decoded, stream))
        return finish(self.element_slices(decoded)) if isinstance(decoded, Outline) else decoded

    def decode_on_loop(self, message: Buffer, stream: ResponseStream) -> InFlightRequest | Outline | LongRequest:
        """As `decode`, as far as that is quick: `outline_slices` and `element_slices` do the rest beside the loop."""
        request = self._templates.find(message, stream)
        if request is not None:
            return request
        try:
            decoded = decode_on_loop(message, self._limits, learn=self._templates.learn)
        except ServerError as error:
            error.name_request(*request_names(message, self._limits))
            raise
        if not isinstance(decoded, LongRequest):
            (decoded.request if isinstance(decoded, Outline) else decoded).stream = stream
        return decoded

    def outline_slices(self, long: LongRequest, stream: ResponseStream) -> Slices[Outline]:
        """The outline of a request with a long head, in slices. Raises as `decode`."""
        try:
            outline = yield from outline_slices(long, self._limits)
        except ServerError as error:
            error.name_request("", known_id(long.split))
            raise
        outline.request.stream = stream
        return outline

    def element_slices(self, outline: Outline) -> Slices[InFlightRequest]:
        """The rest of a request, in slices. Raises as `decode`."""
        try:
            return (yield from element_slices(outline))
        except ServerError as error:
            error.name_request(outline.request.model_name, outline.request.id)
            raise
