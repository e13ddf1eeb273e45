"""Which requests of sequences are accepted: valid ones that find room in the queue and would not be late.

Every call but `check` is made under the batcher's lock.
"""

from __future__ import annotations

from modelserver.core.request import InFlightRequest
from modelserver.errors import InvalidArgumentError, QueueFullError
from modelserver.scheduling.admission import DrainRate, expected_ns
from modelserver.scheduling.sequence_policy import SequenceRules
from modelserver.scheduling.sequence_table import SequenceTable


class SequenceAdmission:
    """`max_queue_size` bounds the waiting requests (0: unbounded). `is_adaptive`: late requests are refused at once."""

    def __init__(
        self, rules: SequenceRules, table: SequenceTable, model_name: str, *, max_queue_size: int, is_adaptive: bool
    ) -> None:
        self.is_adaptive = is_adaptive
        self._is_iterative = rules.is_iterative
        self._table = table
        self._model_name = model_name
        self._max_queue_size = max_queue_size
        self._rate = DrainRate()  # of slots that become free

    def check(self, request: InFlightRequest) -> None:
        """Raise InvalidArgumentError for a request that no sequence could take."""
        what = f"inference request to model '{self._model_name}'"
        if request.rows > 1:
            raise InvalidArgumentError(
                f"{what} must specify batch-size 1 due to requirements of sequence batcher, got {request.rows}"
            )
        if not request.sequence_id and not self._is_iterative:
            raise InvalidArgumentError(f"{what} must specify a non-zero or non-empty correlation ID")

    @property
    def is_full(self) -> bool:
        """Whether the queue has no room for another request."""
        return 0 < self._max_queue_size <= self._table.num_waiting

    def refusal_of_full(self, now_ns: int) -> QueueFullError:
        """The error of a request that finds the queue full."""
        error = QueueFullError(
            f"Exceeds maximum queue size: model '{self._model_name}' already has {self._max_queue_size} requests "
            "in its queue; send fewer at a time, or raise --max-queue-size"
        )
        error.retry_after_s = self._rate.retry_after_s(len(self._table.places.backlog), now_ns)
        return error

    def check_in_time(self, request: InFlightRequest, now_ns: int) -> None:
        """Raise QueueFullError for a request that would get a slot, or be answered, when it is too late.

        Called for those that have a deadline or a timeout: a timeout is about the backlog, a deadline about the answer.
        No request is refused while the rates are unknown.
        """
        ahead = self._table.ahead_of(request)
        slot_ns = self._rate.per_request_ns(now_ns) or 0.0
        turn_ns = ahead.rate.per_request_ns(now_ns) if ahead.rate is not None else None
        wait_ns = expected_ns(slot_ns, ahead.num_sequences, 0, is_answer=False)
        answer_ns = expected_ns(slot_ns, ahead.num_sequences, 0, is_answer=True)
        if turn_ns is not None:
            answer_ns += expected_ns(turn_ns, ahead.num_requests, ahead.num_executing, is_answer=True)
        is_late = request.deadline_ns is not None and now_ns + answer_ns > request.deadline_ns
        if not is_late and (not request.timeout_us or wait_ns <= request.timeout_us * 1000):
            return
        error = QueueFullError(
            f"model '{self._model_name}' cannot answer in time: {ahead.num_sequences} sequences wait for a slot before "
            f"this one, and {ahead.num_requests} requests for their turn, which take about {answer_ns / 1e6:.0f} ms; "
            "send fewer at a time, or give them more time"
        )
        error.retry_after_s = max(1, round(answer_ns / 1e6)) / 1000
        raise error

    def note_released(self, now_ns: int) -> None:
        """Record the slots that have become free since the last call."""
        places = self._table.places
        if not places.num_released:
            return
        num_released, places.num_released = places.num_released, 0
        self._rate.note(num_released, len(places.backlog), now_ns)
