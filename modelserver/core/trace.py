"""The record of a request's way through the server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from modelserver.core.tensor import Tensor


class ComputeNotes(Protocol):
    """An observer of how long a request was computed, and of the requests made for it."""

    def note_compute(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        """The times that a worker knows: it took the request, had the inputs, had the outputs, and was done
        (monotonic).
        """

    def note_durations(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """How long it took if it needed several executions; replaces the times noted before."""

    def note(self, name: str, time_ns: int) -> None:
        """A phase that the instance reports."""

    def follow(self, request: Any) -> None:
        """A request is about to be made for this one (an `InFlightRequest`, whose type is above this)."""


class Trace:
    """Times (monotonic, ns) and, if wanted, tensors of one request, in the order in which they were noted.

    Written by the event loop and the worker that executes the request, one after the other. `caller` is the trace of
    the request that this one was made for, if there is one; else `parent_span` is of the client's own trace, if it has
    sent its context. `trace_id` and `span_id`, of the model's span, are those of W3C Trace Context. `others` is the
    observer that was there before the trace.
    """

    __slots__ = (
        "__weakref__",
        "caller",
        "children",
        "events",
        "has_tensors",
        "has_times",
        "id",
        "is_over",
        "model_name",
        "on_follow",
        "others",
        "parent_span",
        "request_id",
        "span_id",
        "tensors",
        "trace_id",
        "version",
    )

    def __init__(
        self,
        number: int,
        *,
        has_times: bool,
        has_tensors: bool,
        caller: Trace | None = None,
        context: tuple[str, str] | None = None,
    ) -> None:
        """`context`: trace id and span id of the client's, in place of a new trace."""
        self.id = number
        self.has_times = has_times
        self.has_tensors = has_tensors
        self.caller = caller
        if caller is not None:
            context = (caller.trace_id, caller.span_id)
        self.trace_id: str
        self.parent_span: str
        self.trace_id, self.parent_span = context or (os.urandom(16).hex(), "")
        self.span_id: str = os.urandom(8).hex()
        self.model_name = ""
        self.version = 0
        self.request_id = ""
        self.events: list[tuple[str, int]] = []
        # The tensors that were noted, and where.
        self.tensors: list[tuple[str, Tensor]] = []
        # Traces that ended before this one.
        self.children: list[Trace] = []
        self.is_over = False
        self.others: ComputeNotes | None = None
        self.on_follow: Callable[[Trace, Any], None] | None = None

    def note(self, name: str, time_ns: int) -> None:
        """An event, such as REQUEST_START."""
        if self.has_times:
            self.events.append((name, time_ns))

    def note_compute(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        if self.has_times:
            self.events += (
                ("COMPUTE_START", start_ns),
                ("COMPUTE_INPUT_END", input_end_ns),
                ("COMPUTE_OUTPUT_START", output_start_ns),
                ("COMPUTE_END", end_ns),
            )
        if self.others is not None:
            self.others.note_compute(start_ns, input_end_ns, output_start_ns, end_ns)

    def note_durations(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        if self.others is not None:
            self.others.note_durations(input_ns, infer_ns, output_ns)

    def follow(self, request: Any) -> None:
        if self.on_follow is not None:
            self.on_follow(self, request)

    def note_tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        """Tensors at a point such as TENSOR_QUEUE_INPUT."""
        if self.has_tensors:
            self.tensors += [(activity, tensor) for tensor in tensors]
