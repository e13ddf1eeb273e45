"""Notes in a request's trace what becomes of its responses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from modelserver.core.relay import RelayStream
from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.trace import Trace

if TYPE_CHECKING:
    from modelserver.telemetry.tracer import Tracer

# Before and after a request is read, by the protocol of the stream that waits for its answer.
_READ_EVENTS = {
    "HTTP": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "GRPC": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
}


class TracedStream(RelayStream):
    """Stands before a request's stream, and lets go of the trace with the last response."""

    __slots__ = ("_protocol", "_trace", "_tracer")

    def __init__(self, request: InferRequest, trace: Trace, tracer: Tracer, protocol: str | None) -> None:
        """`protocol` is that of the reader behind all others, "" in another process; None: it was made for another."""
        super().__init__(request.stream)
        self._trace: Trace | None = trace
        self._tracer = tracer
        self._protocol = protocol
        trace.others, request.trace = request.trace, trace
        request.trace_parent = tracer.link(trace)
        trace.model_name = request.model_name
        trace.version = request.version or 0
        trace.request_id = request.id
        now_ns = request.arrival_ns
        # A wire hands over whole requests: when their first bytes came is not known here.
        for name in (*_READ_EVENTS.get(protocol or "", ()), "REQUEST_START", "QUEUE_START"):
            trace.note(name, now_ns)
        trace.note_tensors("TENSOR_QUEUE_INPUT", request.inputs.values())

    def deliver(self, response: InferResponse) -> None:
        trace = self._trace
        if trace is None:
            return
        trace.note_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
        now_ns = time.monotonic_ns()
        protocol = self._protocol
        if protocol is not None:  # Triton's frontends tell
            trace.note("INFER_RESPONSE_COMPLETE", now_ns)
        if response.is_final:
            trace.note("REQUEST_END", now_ns)
        if not protocol:  # a request that was made for another one ends before that; others' sending is not seen here
            self._finish_after(response, trace)
            super().deliver(response)
            return
        trace.note(f"{protocol}_SEND_START", now_ns)
        super().deliver(response)
        trace.note(f"{protocol}_SEND_END", time.monotonic_ns())
        self._finish_after(response, trace)

    def _finish_after(self, response: InferResponse, trace: Trace) -> None:
        if response.is_final:
            self._trace = None
            self._tracer.finish(trace)
