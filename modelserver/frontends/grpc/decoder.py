"""From a ModelInferRequest to a request: by a template where it is known, in full where it is not."""

from __future__ import annotations

from modelserver.core.request import InferRequest
from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError
from modelserver.frontends.grpc.codec import GrpcLimits, decode_infer_request, request_names
from modelserver.frontends.grpc.templates import Templates


class InferDecoder:
    """Decodes requests within `limits`. Event loop thread only."""

    def __init__(self, limits: GrpcLimits) -> None:
        self._limits = limits
        self._templates = Templates()

    def decode(self, message: Buffer, stream: ResponseStream) -> InferRequest:
        """The request, whose responses go to `stream`. Raises ServerError for everything that is wrong with it."""
        request = self._templates.find(message, stream)
        if request is None:
            try:
                request = decode_infer_request(message, self._limits, learn=self._templates.learn)
            except ServerError as error:
                error.name_request(*request_names(message))
                raise
            request.stream = stream
        return request
