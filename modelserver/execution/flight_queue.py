"""What is to be sent to a child process next: batches that wait for one, and suspects, which go alone.

A child that dies while it executes a batch of several requests leaves open which of them ended it. Each is sent once
more, by itself, and nothing else until it is answered: so the one that ends another child is known, and fails alone.
No clock, no socket: times are the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from modelserver.backend import InferRequest, InferResponse, ServerError
from modelserver.errors import CancelledError, QueueTimeoutError
from modelserver.execution.flight import Flight, Result


class FlightQueue:
    """Loop thread only, as flights are."""

    def __init__(self) -> None:
        self._waiting: list[Flight] = []
        self._suspects: deque[Flight] = deque()
        self._suspect: Flight | None = None  # the one that was sent

    def __bool__(self) -> bool:
        return bool(self._waiting or self._suspects)

    def add(self, flight: Flight) -> None:
        self._waiting.append(flight)

    def put_back(self, flights: Sequence[Flight]) -> None:
        """Flights that their child never began: they go first to the next one."""
        for flight in reversed(flights):
            if flight.is_suspect:
                self._suspect = None
                self._suspects.appendleft(flight)
        self._waiting[:0] = [flight for flight in flights if not flight.is_suspect]

    def isolate(self, flight: Flight) -> None:
        """Have the requests of a batch that a child died of executed one by one; then it is finished."""
        trial = _Trial(self, flight)
        self._suspects.extend(trial.flights)

    def take(self, now_ns: int) -> list[Flight]:
        """What is to be sent now, in one message: one suspect if there is any, else all that waits.

        Suspects that nobody wants any more are finished here.
        """
        while self._suspects and self._suspect is None:
            flight = self._suspects.popleft()
            refusal = _refusal(flight.requests[0], now_ns)
            if refusal is None:
                self._suspect = flight
                return [flight]
            flight.finish(refusal)
        if self._suspect is not None:
            return []
        flights, self._waiting = self._waiting, []
        return flights

    def note_wait(self, now_s: float) -> None:
        """There is no child to send to: whoever does not wait yet does so from now on."""
        for flight in (*self._suspects, *self._waiting):
            flight.since_s = flight.since_s or now_s

    def has_child(self) -> None:
        """There is a child: nobody waits for one."""
        for flight in (*self._suspects, *self._waiting):
            flight.since_s = 0.0

    def take_waiting(self, since_s: float) -> list[Flight]:
        """The flights that have waited since that time or before: they leave."""
        left = [flight for flight in (*self._suspects, *self._waiting) if flight.since_s <= since_s]
        self._suspects = deque(flight for flight in self._suspects if flight.since_s > since_s)
        self._waiting = [flight for flight in self._waiting if flight.since_s > since_s]
        return left

    def has_answered(self, flight: Flight) -> None:
        """A suspect has its result."""
        if self._suspect is flight:
            self._suspect = None


class _Trial:
    """The requests of one batch, each in a flight of its own; finishes the batch when all have ended."""

    def __init__(self, queue: FlightQueue, batch: Flight) -> None:
        self._queue = queue
        self._batch = batch
        self._num_left = 0
        self._duration_ns = 0
        self.flights: list[Flight] = []
        for position, request in enumerate(batch.sent()):
            flight = Flight([request], lambda result, ns, at=position: self._on_done(at, result, ns))  # type: ignore[misc]
            flight.is_suspect = True
            self.flights.append(flight)
        self._num_left = len(self.flights)
        self._entries: list[InferResponse | ServerError | None] = [None] * self._num_left

    def _on_done(self, position: int, result: Result, duration_ns: int) -> None:
        self._queue.has_answered(self.flights[position])
        self._entries[position] = result if isinstance(result, ServerError) else result[0]
        self._duration_ns += duration_ns
        self._num_left -= 1
        if not self._num_left:
            self._batch.finish(self._entries, self._duration_ns)


def _refusal(request: InferRequest, now_ns: int) -> ServerError | None:
    if request.is_cancelled:
        return CancelledError(f"request to model '{request.model_name}' was cancelled")
    if request.deadline_ns is not None and request.deadline_ns <= now_ns:
        return QueueTimeoutError(
            f"Request timeout expired: model '{request.model_name}' was being restarted when its deadline passed"
        )
    return None
