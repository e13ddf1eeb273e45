"""ModelInfer's end of a request: its one response becomes the reply of the call."""

from __future__ import annotations

from functools import partial

from modelserver.core.long_work import Result, at_once, long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import is_long
from modelserver.errors import UnsupportedError
from modelserver.frontends.grpc.codec import encode_infer_response
from modelserver.frontends.grpc.edge import fail
from modelserver.protocol.call import Parts, UnaryCall


class UnaryReply(ResponseStream):
    """Takes a request's responses and ends the call with the only one.

    A decoupled model may send its response first and an empty final one later: the reply waits for the end, because
    this call cannot carry a second response, or none at all. `request` is set before the request is submitted.
    """

    __slots__ = ("_held", "call", "request")

    protocol = "GRPC"

    request: InFlightRequest

    def __init__(self, call: UnaryCall) -> None:
        self.on_read = None  # the stream's other state is for readers, and this stream reads itself
        self.call: UnaryCall | None = call  # None once the call was ended
        self._held: InferResponse | None = None

    def deliver(self, response: InferResponse) -> None:
        call = self.call
        if call is None:
            return
        if not response.is_final and self._held is None and response.error is None:
            self._held = response
            return
        request, held = self.request, self._held
        self.call = self._held = None  # as `release`
        self.request = None  # type: ignore[assignment]  # not used any more
        if response.error is not None:
            if not response.is_final:
                request.cancel()
            fail(call, response.error)
            return
        try:
            if request.is_decoupled or held is not None:
                response = _only(request, held, response)
            if is_long(response.outputs, as_text=False):
                encode = at_once(partial(encode_infer_response, request, response))
                call.on_cancel = long_work().start(encode, partial(_reply, call))
                return
            parts = encode_infer_response(request, response)
        except Exception as error:
            request.cancel()
            fail(call, error)
        else:
            call.reply(parts)

    def release(self) -> None:
        """Release the call, which is ended.

        The request has this object as its stream: a cycle would keep its tensors in memory until the garbage collector
        runs.
        """
        self.call = self._held = None
        self.request = None  # type: ignore[assignment]  # not used any more


def _reply(call: UnaryCall, encoded: Result[Parts]) -> None:
    try:
        parts = encoded()
    except Exception as error:
        fail(call, error)
    else:
        call.reply(parts)


def _only(request: InFlightRequest, held: InferResponse | None, last: InferResponse) -> InferResponse:
    """The one response, from an earlier one, if any, and the last.

    Raises UnsupportedError, and cancels the request, unless there was exactly one.
    """
    is_empty = last.is_final and last.is_empty
    if held is None and not is_empty:
        return last
    if held is not None and is_empty:
        return held
    number = "no" if held is None else "more than one"
    raise UnsupportedError(
        f"ModelInfer RPC doesn't support models with decoupled transaction policy: model '{request.model_name}' sent "
        f"{number} response, which has to be exactly one; call ModelStreamInfer"
    )
