"""Batches on their way through a child process, and which of them is sent next.

When a child dies during a batch of several requests, it is unknown which of them caused that. Each is sent once more,
alone, with nothing else until it is answered. So the request that ends another child is known, and fails alone. No
clock, no socket: callers pass times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from modelserver.backend import InferResponse, ServerError
from modelserver.core.datatype import Datatype
from modelserver.core.long_work import Slices
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import MAX_BYTES_IN_TURN, num_bytes
from modelserver.errors import CancelledError, QueueTimeoutError
from modelserver.execution.process.messages import RequestRecord
from modelserver.execution.process.packing import Payload, request_record

# One entry for each request (None: its sender answers), or the error of the whole batch.
Result = Sequence[InferResponse | ServerError | None] | ServerError
# Gets the result, and the time in ns that the child took; 0 if unknown.
OnDone = Callable[[Result, int], None]


class InFlightBatch:
    """A batch, and the callback for its result, which is called exactly once, on the loop thread of its instance.

    `numbers` are those of the requests that were sent, contiguous. A batch that its child never began may be sent
    again, to the next child. A suspect is one request of a batch during which a child died; `is_lost`: a child died
    before it sent the answer of the batch.
    """

    __slots__ = ("_on_done", "_refused", "is_lost", "is_suspect", "numbers", "requests", "since_s")

    def __init__(self, requests: Sequence[InFlightRequest], on_done: OnDone) -> None:
        self.requests = requests
        self.numbers = range(0)
        self.since_s = 0.0  # when it began to wait for a child
        self.is_suspect = self.is_lost = False
        self._on_done = on_done
        self._refused: dict[int, ServerError] = {}

    def preparing(self, payload: Payload) -> Slices[None]:
        """Pack the tensors that need it before `write`, in slices."""
        for request in self.requests:
            for tensor in request.inputs.values():
                with suppress(ServerError):  # `write` raises it again
                    yield from payload.prepare(tensor)

    def write(self, first_number: int, payload: Payload) -> list[RequestRecord]:
        """The records of the requests. Requests that cannot be packed get their error when the rest is answered."""
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

    @property
    def is_long(self) -> bool:
        """Whether its tensors are too large to be copied in one turn of the event loop."""
        total = 0
        for request in self.requests:
            for tensor in request.inputs.values():
                total += num_bytes(tensor) if tensor.datatype is Datatype.BYTES else tensor.data.nbytes
        return total > MAX_BYTES_IN_TURN

    def sent(self) -> Sequence[InFlightRequest]:
        """The requests of `numbers`, in order."""
        if not self._refused:
            return self.requests
        return [request for index, request in enumerate(self.requests) if index not in self._refused]

    def finish(self, answered: Result, duration_ns: int = 0) -> None:
        """Report the result: `answered` is for the requests that were sent."""
        if self._refused and not isinstance(answered, ServerError):
            entries = iter(answered)
            answered = [
                self._refused[index] if index in self._refused else next(entries) for index in range(len(self.requests))
            ]
        self._on_done(answered, duration_ns)


class InFlightQueue:
    """What a child gets next: waiting batches, and suspects, which go alone. Loop thread only."""

    def __init__(self) -> None:
        self._waiting: list[InFlightBatch] = []
        self._suspects: deque[InFlightBatch] = deque()
        self._suspect: InFlightBatch | None = None  # the one that was sent

    def __bool__(self) -> bool:
        return bool(self._waiting or self._suspects)

    def add(self, batch: InFlightBatch) -> None:
        self._waiting.append(batch)

    def put_back(self, batches: Sequence[InFlightBatch]) -> None:
        """Put back batches that their child never began. The next child gets them first."""
        for batch in reversed(batches):
            if batch.is_suspect:
                self._suspect = None
                self._suspects.appendleft(batch)
        self._waiting[:0] = [batch for batch in batches if not batch.is_suspect]

    def isolate(self, batch: InFlightBatch) -> None:
        """Have the requests of a batch during which a child died executed one by one; then finish the batch."""
        trial = _Trial(self, batch)
        self._suspects.extend(trial.batches)

    def take(self, now_ns: int) -> list[InFlightBatch]:
        """The batches to send now, in one message: one suspect if there is any, else all that wait.

        Cancelled and expired suspects are finished here.
        """
        while self._suspects and self._suspect is None:
            batch = self._suspects.popleft()
            refusal = _refusal(batch.requests[0], now_ns)
            if refusal is None:
                self._suspect = batch
                return [batch]
            batch.finish(refusal)
        if self._suspect is not None:
            return []
        batches, self._waiting = self._waiting, []
        return batches

    def note_wait(self, now_s: float) -> None:
        """There is no child to send to: note since when each batch waits."""
        for batch in (*self._suspects, *self._waiting):
            batch.since_s = batch.since_s or now_s

    def has_child(self) -> None:
        """There is a child again: no batch waits for one."""
        for batch in (*self._suspects, *self._waiting):
            batch.since_s = 0.0

    def take_waiting(self, since_s: float) -> list[InFlightBatch]:
        """Remove and return the batches that have waited since `since_s` or longer."""
        left = [batch for batch in (*self._suspects, *self._waiting) if batch.since_s <= since_s]
        self._suspects = deque(batch for batch in self._suspects if batch.since_s > since_s)
        self._waiting = [batch for batch in self._waiting if batch.since_s > since_s]
        return left

    def has_answered(self, batch: InFlightBatch) -> None:
        """A suspect has its result."""
        if self._suspect is batch:
            self._suspect = None


class _Trial:
    """The requests of one batch, each in a batch of its own; finishes the batch when all have ended."""

    def __init__(self, queue: InFlightQueue, batch: InFlightBatch) -> None:
        self._queue = queue
        self._batch = batch
        self._num_left = 0
        self._duration_ns = 0
        self.batches: list[InFlightBatch] = []
        for position, request in enumerate(batch.sent()):
            lone = InFlightBatch([request], lambda result, ns, at=position: self._on_done(at, result, ns))  # type: ignore[misc]
            lone.is_suspect = True
            self.batches.append(lone)
        self._num_left = len(self.batches)
        self._entries: list[InferResponse | ServerError | None] = [None] * self._num_left

    def _on_done(self, position: int, result: Result, duration_ns: int) -> None:
        self._queue.has_answered(self.batches[position])
        self._entries[position] = result if isinstance(result, ServerError) else result[0]
        self._duration_ns += duration_ns
        self._num_left -= 1
        if not self._num_left:
            self._batch.finish(self._entries, self._duration_ns)


def _refusal(request: InFlightRequest, now_ns: int) -> ServerError | None:
    if request.is_cancelled:
        return CancelledError(f"request to model '{request.model_name}' was cancelled")
    if request.deadline_ns is not None and request.deadline_ns <= now_ns:
        return QueueTimeoutError(
            f"Request timeout expired: model '{request.model_name}' was being restarted when its deadline passed"
        )
    return None
