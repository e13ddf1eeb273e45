"""ModelInfer's end of a request: its one response becomes the reply of the call."""

from __future__ import annotations

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.stream import ResponseStream
from modelserver.errors import UnsupportedError
from modelserver.frontends.grpc.call import UnaryCall
from modelserver.frontends.grpc.codec import encode_infer_response
from modelserver.frontends.grpc.edge import fail


class UnaryReply(ResponseStream):
    """Takes a request's responses and ends the call with the first, which must be the only one.

    `request` is set before the request is submitted.
    """

    __slots__ = ("_call", "request")

    request: InferRequest

    def __init__(self, call: UnaryCall) -> None:
        super().__init__()
        self._call: UnaryCall | None = call

    def deliver(self, response: InferResponse) -> None:
        call = self._call
        if call is None:
            return
        request = self.request
        self.release()
        if response.error is not None:
            fail(call, response.error)
            return
        try:
            if not response.is_final:
                raise UnsupportedError(
                    f"model '{request.model_name}' answers with more than one response; call ModelStreamInfer"
                )
            parts = encode_infer_response(request, response)
        except Exception as error:
            request.cancel()
            fail(call, error)
        else:
            call.reply(parts)

    def release(self) -> None:
        """Let go of the call, which is ended.

        The request has this object as its stream: a circle would keep its tensors in memory until the garbage
        collector comes by.
        """
        self._call = None
        self.request = None  # type: ignore[assignment]  # nobody asks any more
