"""One batch on its way through a child process, from the scheduler's side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelserver.backend import InferRequest, InferResponse, ServerError
from modelserver.execution.messages import RequestRecord
from modelserver.execution.packing import Payload
from modelserver.execution.records import request_record

# One entry for each request (None: its sender answers), or why the whole batch failed.
Result = Sequence[InferResponse | ServerError | None] | ServerError
# With the result the time in ns that the child took; 0 when it did not say.
OnDone = Callable[[Result, int], None]


class Flight:
    """A batch and who is told of its end: exactly once, on the loop thread of its instance.

    `numbers` are those of the requests that were sent, contiguous. A flight that its child never began may be sent
    again, to the next child. A suspect is one request of a batch that a child died of; `is_lost` says that a child died
    with the answer of the flight.
    """

    __slots__ = ("_on_done", "_refused", "is_lost", "is_suspect", "numbers", "requests", "since_s")

    def __init__(self, requests: Sequence[InferRequest], on_done: OnDone) -> None:
        self.requests = requests
        self.numbers = range(0)
        self.since_s = 0.0  # when it began to wait for a child
        self.is_suspect = self.is_lost = False
        self._on_done = on_done
        self._refused: dict[int, ServerError] = {}

    def write(self, first_number: int, payload: Payload) -> list[RequestRecord]:
        """The records of what is to be sent; what cannot travel is refused when the rest is answered."""
        records: list[RequestRecord] = []
        if self._refused:
            self._refused = {}
        for index, request in enumerate(self.requests):
            try:
                records.append(request_record(request, payload, first_number + len(records)))
            except ServerError as error:
                self._refused[index] = error
        self.numbers = range(first_number, first_number + len(records))
        return records

    def sent(self) -> Sequence[InferRequest]:
        """The requests of `numbers`, in order."""
        if not self._refused:
            return self.requests
        return [request for index, request in enumerate(self.requests) if index not in self._refused]

    def finish(self, answered: Result, duration_ns: int = 0) -> None:
        """Tell of the end: `answered` is for the requests that were sent."""
        if self._refused and not isinstance(answered, ServerError):
            entries = iter(answered)
            answered = [
                self._refused[index] if index in self._refused else next(entries) for index in range(len(self.requests))
            ]
        self._on_done(answered, duration_ns)
