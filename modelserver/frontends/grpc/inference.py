"""Inference over gRPC: one call, and streams of calls. Decodes, calls the data plane, answers from its callback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from modelserver.auth.access import ApiGroup
from modelserver.core.long_work import Result, at_once, long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import is_long
from modelserver.errors import UnsupportedError
from modelserver.frontends.grpc import codec
from modelserver.frontends.grpc.codec import encode_infer_response
from modelserver.frontends.grpc.decoder import InferDecoder
from modelserver.frontends.grpc.edge import fail, streamed
from modelserver.frontends.grpc.stream import InferStream
from modelserver.planes.data import InferPlane
from modelserver.protocol.call import Method, Parts, StreamCall, UnaryCall
from modelserver.protocol.limits import GrpcLimits


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


# At a drain, streams are read a little longer, for messages that clients sent before they could know.
_LAST_REQUESTS_S = 0.25


class Inference:
    """ModelInfer and ModelStreamInfer. Event loop thread only."""

    def __init__(self, dataplane: InferPlane, limits: GrpcLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits
        self._decoder = InferDecoder(limits)
        self._forwards = bool(limits.access.forward_pattern)
        self._reads_context = limits.access.reads_context
        self._names_callers = bool(limits.access.callers_by)
        self._knows_objectives = bool(limits.access.objectives)
        self._streams: set[InferStream] = set()
        self._is_draining = False

    @property
    def methods(self) -> Mapping[str, Method]:
        return {
            "ModelInfer": Method(unary=self._model_infer, group=ApiGroup.INFERENCE),
            "ModelStreamInfer": streamed(self._model_stream_infer).of(ApiGroup.INFERENCE),
        }

    def drain(self) -> None:
        """Open streams soon take no more requests, and end when those in flight are answered."""
        self._is_draining = True
        for stream in self._streams:
            self._drain_soon(stream)

    def _drain_soon(self, stream: InferStream) -> None:
        """Take messages that the client sent before it could know of the drain."""
        asyncio.get_running_loop().call_later(_LAST_REQUESTS_S, stream.drain)

    def _model_infer(self, call: UnaryCall) -> None:
        reply = UnaryReply(call)
        try:
            decoded = self._decoder.decode_on_loop(call.message, reply)
            if isinstance(decoded, codec.LongRequest):
                outline = self._decoder.outline_slices(decoded, reply)
                call.on_cancel = long_work().start(outline, partial(self._take_outline, call, reply))
                return
            if isinstance(decoded, codec.Outline):
                self._decode_elements(call, reply, decoded)
                return
        except Exception as error:
            reply.release()
            fail(call, error)
        else:
            self._infer(call, reply, decoded)

    def _take_outline(self, call: UnaryCall, reply: UnaryReply, result: Result[codec.Outline]) -> None:
        try:
            self._decode_elements(call, reply, result())
        except Exception as error:
            reply.release()
            fail(call, error)

    def _decode_elements(self, call: UnaryCall, reply: UnaryReply, outline: codec.Outline) -> None:
        """Raises ServerError for a request that its model does not take."""
        self._dataplane.check_inputs(outline.request)
        infer = partial(self._infer_decoded, call, reply)
        call.on_cancel = long_work().start(self._decoder.element_slices(outline), infer)

    def _infer_decoded(self, call: UnaryCall, reply: UnaryReply, result: Result[InFlightRequest]) -> None:
        try:
            request = result()
        except Exception as error:
            reply.release()
            fail(call, error)
        else:
            self._infer(call, reply, request)

    def _infer(self, call: UnaryCall, reply: UnaryReply, request: InFlightRequest) -> None:
        try:
            if call.deadline_ns is not None:
                request.deadline_ns = call.deadline_ns
            if self._forwards and (headers := self._limits.access.forwarded(call.metadata)):
                request.forward(headers)
            if self._reads_context and (context := self._limits.access.context(call.metadata)):
                request.join_trace(context)
            if self._names_callers:
                request.caller = self._limits.access.caller(call.metadata, call.peer)
            if self._knows_objectives and not request.priority:
                request.priority = self._limits.access.priority(call.metadata)
            reply.request = request
            self._dataplane.infer(request)
        except Exception as error:
            reply.release()
            fail(call, error)
        else:
            if reply.call is not None:
                call.on_cancel = request.cancel

    async def _model_stream_infer(self, call: StreamCall) -> None:
        stream = InferStream(call, self._dataplane, self._decoder, self._limits)
        self._streams.add(stream)
        if self._is_draining:
            self._drain_soon(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
