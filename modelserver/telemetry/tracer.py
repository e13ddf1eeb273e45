"""Decides which requests are traced, and delivers their traces."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, RelayStream
from modelserver.core.trace import Trace
from modelserver.telemetry.otel import Sampler, TraceCollector, check_installed, is_sampled, parse_context
from modelserver.telemetry.trace_file import TraceFile
from modelserver.telemetry.trace_settings import (
    OPENTELEMETRY,
    TENSORS,
    TIMESTAMPS,
    TRITON,
    Changes,
    TraceOptions,
    TraceSettings,
    changed,
    document,
)

logger = logging.getLogger(__name__)

_MAX_WAITING = 10_000
_CLOSE_TIMEOUT_S = 5.0
# The newest traces that clients can read.
_NUM_RECENT = 100
# Before and after a request is read, by the protocol of the stream that waits for its answer.
_READ_EVENTS = {
    "HTTP": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "GRPC": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
}


class _Sampler:
    """Settings, and the number of requests under them."""

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.num_left = settings.count
        self._num_seen = 0

    def takes(self) -> bool:
        """Whether to trace this request; called once per request."""
        if not self.settings.rate:
            return False
        self._num_seen += 1
        if self._num_seen % self.settings.rate or self.num_left == 0:
            return False
        self.num_left -= self.num_left > 0
        return True

    def now(self) -> TraceSettings:
        """The settings, with the remaining count."""
        settings = self.settings
        return TraceSettings(settings.levels, settings.rate, self.num_left, settings.log_frequency)


class Tracer:
    """All but `close` are called from the event loop thread. `is_on` is false where no request can be traced."""

    def __init__(self, options: TraceOptions | None = None, *, version: str = "") -> None:
        self.options = options or TraceOptions()
        self._version = version
        # Settings by clients: for the server, and for models.
        self._changes: dict[str, Any] = {}
        self._model_changes: dict[str, dict[str, Any]] = {}
        self._server = _Sampler(self.options.start)
        self._models: dict[str, _Sampler] = {}
        self._numbers = itertools.count(1)
        # By their links, so that requests made by models find their parent trace.
        self._traces: WeakValueDictionary[str, Trace] = WeakValueDictionary()
        self._writer: _Writer | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=_NUM_RECENT)
        self._otel_sampler = Sampler(self.options.sampler) if self.options.sampler else None
        if self.options.mode == OPENTELEMETRY:
            check_installed()
        self.is_on = self._can_trace()

    def settings(self, model_name: str = "") -> Mapping[str, str | list[str]]:
        """The settings of a model, or of the server, as the protocol shows them."""
        return document(self._models.get(model_name, self._server).now(), self.options)

    def update(self, changes: Changes, model_name: str = "") -> Mapping[str, str | list[str]]:
        """Change some settings, all or none; the settings then. Raises as `trace_settings.changed` does."""
        if not changes:
            return self.settings(model_name)
        if not model_name:
            self._changes = changed(self._changes, changes)
            self._server = _Sampler(self._with(self.options.start, self._changes))
        else:
            self._model_changes[model_name] = changed(self._model_changes.get(model_name, {}), changes)
        for name, own in list(self._model_changes.items()):
            if not own:
                del self._model_changes[name]
                self._models.pop(name, None)
            elif not model_name or name == model_name:
                self._models[name] = _Sampler(self._with(self._server.settings, own))
        self.is_on = self._can_trace()
        return self.settings(model_name)

    def link(self, trace: Trace) -> str:
        """The link from a request to its parent request: a W3C `traceparent` if others may read it."""
        if self.options.mode == OPENTELEMETRY:
            return f"00-{trace.trace_id}-{trace.span_id}-01"
        return f"#{trace.id}"

    def sample(self, model_name: str, parent: str = "", *, is_call: bool = False) -> Trace | None:
        """A trace for a request of that model, if it is to be traced. A request with a parent trace always is.

        `is_call`: a model has made the request; it is traced as part of the one that it was made for, or not at all.
        """
        caller = self._traces.get(parent) if parent else None
        if caller is not None:
            return self._add(self._child(caller))
        if is_call:
            return None
        sampler = self._models.get(model_name, self._server)
        levels = sampler.settings.levels
        context = parse_context(parent) if parent and self.options.mode == OPENTELEMETRY else None
        if not levels:
            return None
        if self._otel_sampler is not None:
            is_recorded = context is not None and is_sampled(parent)
            context = self._otel_sampler.context(context, is_sampled=is_recorded, name=model_name)
            if context is None:
                return None
        elif context is None and not sampler.takes():
            return None
        # Tensors alone are not enough: Triton's tools need the times of a request.
        has_times = TIMESTAMPS in levels or TENSORS in levels
        has_tensors = TENSORS in levels
        return self._add(Trace(next(self._numbers), has_times=has_times, has_tensors=has_tensors, context=context))

    def follow(self, caller: Trace, request: InFlightRequest) -> None:
        """Trace a request that is about to be made for another one, which is traced."""
        request.arrival_ns = time.monotonic_ns()
        request.stream = TracedStream(request, self._add(self._child(caller)), self, None)

    def _child(self, caller: Trace) -> Trace:
        has_times, has_tensors = caller.has_times, caller.has_tensors
        return Trace(next(self._numbers), has_times=has_times, has_tensors=has_tensors, caller=caller)

    def _add(self, trace: Trace) -> Trace:
        trace.on_follow = self.follow
        self._traces[self.link(trace)] = trace
        return trace

    def finish(self, trace: Trace) -> None:
        """End a request's trace: it is written from another thread, or with its caller's trace."""
        trace.is_over = True
        if trace.caller is not None and not trace.caller.is_over:
            trace.caller.children.append(trace)
            return
        self._recent.append({"ended_ms": time.time_ns() // 1_000_000, **_times(trace)})
        if self.options.mode == TRITON and not self.options.file:
            return
        if self._writer is None:
            self._writer = _Writer(self.options, self._version)
        self._writer.put(trace, self._models.get(trace.model_name, self._server).settings.log_frequency)

    def recent(self) -> list[dict[str, Any]]:
        """The newest traces, the newest first: what was traced and when (monotonic, ns), without tensors."""
        return [*reversed(self._recent)]

    def close(self) -> None:
        """Write the remaining traces. Blocking."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _can_trace(self) -> bool:
        return any(sampler.settings.levels for sampler in (self._server, *self._models.values()))

    @staticmethod
    def _with(settings: TraceSettings, values: Mapping[str, Any]) -> TraceSettings:
        return TraceSettings(
            values.get("levels", settings.levels),
            values.get("rate", settings.rate),
            values.get("count", settings.count),
            values.get("log_frequency", settings.log_frequency),
        )


def _times(trace: Trace) -> dict[str, Any]:
    return {
        "id": trace.id,
        "model_name": trace.model_name,
        "model_version": str(trace.version),
        "request_id": trace.request_id,
        "timestamps": [{"name": name, "ns": time_ns} for name, time_ns in trace.events],
        "children": [_times(child) for child in trace.children],
    }


class _Writer:
    """A thread that writes traces, to a file at once, to a collector when enough are there or time has passed."""

    def __init__(self, options: TraceOptions, version: str) -> None:
        is_otel = options.mode == OPENTELEMETRY
        self._file = None if is_otel else TraceFile(options.file)
        self._collector = TraceCollector(options, version) if is_otel else None
        self._delay_s = options.bsp_schedule_delay_ms / 1000 if is_otel else 0.0
        # None ends the thread. If the queue is full, traces are dropped: tracing must not delay requests.
        size = options.bsp_max_queue_size if is_otel else _MAX_WAITING
        self._traces: queue.Queue[tuple[Trace, int] | None] = queue.Queue(size)
        self._is_dropping = False
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def put(self, trace: Trace, log_frequency: int) -> None:
        if not self._traces.full():
            self._is_dropping = False
            self._traces.put_nowait((trace, log_frequency))
        elif not self._is_dropping:
            self._is_dropping = True
            logger.warning("the queue of traces is full: traces are dropped until it has room again")

    def close(self) -> None:
        self._is_ending.set()
        self._traces.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._collector is not None:
            self._collector.close()
            self._thread.join()

    def _run(self) -> None:
        is_running = True
        while is_running:
            first = self._traces.get()
            if self._delay_s and first is not None:
                self._is_ending.wait(self._delay_s)
            batch = [] if first is None else [first]
            is_running = first is not None
            while is_running and len(batch) < _MAX_WAITING and not self._traces.empty():
                entry = self._traces.get()
                if entry is None:
                    is_running = False
                else:
                    batch.append(entry)
            if batch:
                self._write(batch)
        if self._file is not None:
            self._file.close()

    def _write(self, batch: list[tuple[Trace, int]]) -> None:
        if self._collector is not None:
            self._collector.send([trace for trace, _ in batch])
        elif self._file is not None:
            self._file.write(batch)


class TracedStream(RelayStream):
    """Wraps a request's stream, and ends the trace with the last response."""

    __slots__ = ("_protocol", "_trace", "_tracer")

    def __init__(self, request: InFlightRequest, trace: Trace, tracer: Tracer, protocol: str | None) -> None:
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
        # A wire hands over complete requests, so the arrival of the first bytes is unknown here.
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
