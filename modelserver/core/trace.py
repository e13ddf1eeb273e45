"""What is noted of a request that is traced."""

from __future__ import annotations

from collections.abc import Iterable

from modelserver.core.tensor import Tensor


class Trace:
    """Times (monotonic, ns) and, if wanted, tensors of one request, in the order in which they were noted.

    Written by the event loop and the worker that executes the request, one after the other. `parent` is the W3C trace
    context that the client sent, if it did.
    """

    __slots__ = ("events", "has_tensors", "has_times", "id", "model_name", "parent", "request_id", "tensors", "version")

    def __init__(self, number: int, *, has_times: bool, has_tensors: bool) -> None:
        self.id = number
        self.has_times = has_times
        self.has_tensors = has_tensors
        self.model_name = ""
        self.version = 0
        self.request_id = ""
        self.parent = ""
        self.events: list[tuple[str, int]] = []
        # What was seen, and where.
        self.tensors: list[tuple[str, Tensor]] = []

    def note(self, name: str, time_ns: int) -> None:
        """An event, such as REQUEST_START."""
        if self.has_times:
            self.events.append((name, time_ns))

    def note_compute(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        """What a worker knows: when it took the request, had its inputs, had its outputs, and was done."""
        if self.has_times:
            self.events += (
                ("COMPUTE_START", start_ns),
                ("COMPUTE_INPUT_END", input_end_ns),
                ("COMPUTE_OUTPUT_START", output_start_ns),
                ("COMPUTE_END", end_ns),
            )

    def note_tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        """Tensors as they are there, such as TENSOR_QUEUE_INPUT."""
        if self.has_tensors:
            self.tensors += [(activity, tensor) for tensor in tensors]
