"""From a ModelInferRequest to a request: by a template if it is known, in full otherwise."""

from __future__ import annotations

from modelserver.core.long_work import Slices, finish
from modelserver.core.request import InFlightRequest
from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError
from modelserver.frontends.grpc.codec import Outline, decode_on_loop, element_slices, request_names
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
        return finish(self.element_slices(decoded)) if isinstance(decoded, Outline) else decoded

    def decode_on_loop(self, message: Buffer, stream: ResponseStream) -> InFlightRequest | Outline:
        """As `decode`. If that takes long, the request's outline: `element_slices` does the rest beside the loop."""
        request = self._templates.find(message, stream)
        if request is not None:
            return request
        try:
            decoded = decode_on_loop(message, self._limits, learn=self._templates.learn)
        except ServerError as error:
            error.name_request(*request_names(message, self._limits))
            raise
        request = decoded.request if isinstance(decoded, Outline) else decoded
        request.stream = stream
        return decoded

    def element_slices(self, outline: Outline) -> Slices[InFlightRequest]:
        """The rest of a request, in slices. Raises as `decode`."""
        try:
            return (yield from element_slices(outline))
        except ServerError as error:
            error.name_request(outline.request.model_name, outline.request.id)
            raise
