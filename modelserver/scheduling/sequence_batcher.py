"""The scheduler of models with `sequence_batching`: requests of a sequence stay on one instance, in order.

Unlike `Batcher` it has a part for each instance (`InstanceSource`), because a worker may take only from the
sequences that its instance holds. `SequenceTable` decides what moves where. Lock, clock and answers are in
`SequenceQueue`.
"""

from __future__ import annotations

import logging

from modelserver.core.request import InFlightRequest
from modelserver.core.stream import ResponseStream
from modelserver.errors import (
    InvalidArgumentError,
    QueueFullError,
    ServerError,
)
from modelserver.scheduling.refusal import refuse
from modelserver.scheduling.sequence import EndHook, SequenceEntry
from modelserver.scheduling.sequence_queue import SequenceQueue
from modelserver.scheduling.sequence_source import InstanceSource
from modelserver.telemetry.statistics_snapshot import FailureReason

logger = logging.getLogger(__name__)


class SequenceBatcher(SequenceQueue):
    """As with `Batcher`, every accepted request is answered exactly once."""

    def source(self, on_end: EndHook | None = None) -> InstanceSource:
        """The part of another instance, for its worker. From any thread."""
        with self.lock:
            slots = self.table.add_instance(hears_ends=on_end is not None)
            self.instances = (*self.instances, slots)
            self.wake_touched()
        return InstanceSource(self, slots, on_end)

    def submit(self, request: InFlightRequest) -> ResponseStream:
        """Queue the request in its sequence. Called from the event loop thread; answers and raises as `Batcher`.

        Raises InvalidArgumentError too: no correlation id, more than one row, or a sequence that nobody began; and
        QueueFullError for one that would be late.
        """
        now_ns = self.now_ns()
        if request.arrival_ns == 0:
            request.arrival_ns = now_ns
        self._check(request, now_ns)
        may_be_late = self.admission.is_adaptive and (request.deadline_ns is not None or request.timeout_us > 0)
        displaced: list[SequenceEntry] = []
        problem: ServerError | None = None
        with self.lock:
            try:
                if may_be_late:
                    self.admission.check_in_time(request, now_ns)
                if self._is_queue_bounded and self.admission.is_full:
                    self.table.check(request)
                    displaced = self.table.make_room(request, now_ns)
                    if not displaced:
                        raise self.admission.refusal_of_full(now_ns)
                entry = self.table.add(request, now_ns)
            except (InvalidArgumentError, QueueFullError) as error:
                problem = error
            else:
                expires_ns = self._expiry_of(entry, now_ns)
                if expires_ns is not None:
                    self._expiry.add(entry, expires_ns)
                num_conflicts, self.table.num_conflicts = self.table.num_conflicts, 0
            self.wake_touched()
        if displaced:
            full = self.admission.refusal_of_full(now_ns)
            self._answer_failed([(entry, full) for entry in displaced], FailureReason.REJECTED, now_ns)
        if problem is not None:
            self._record(problem, request, now_ns)
            raise problem
        if num_conflicts:
            logger.warning(
                "sequence %s for model '%s' has a conflict: the previous sequence did not end before this one began; "
                "it is ended early",
                request.sequence_id,
                self._model_name,
            )
        self.inflight += 1
        request.on_cancel = self.cancel_callback
        self._alarm.set(now_ns + self.rules.idle_ns, now_ns, self._on_alarm)
        if expires_ns is not None:
            self._alarm.set(expires_ns, now_ns, self._on_alarm)
        return request.stream

    def hurry(self) -> None:
        """No request waits for company in its batch any more. Called from the event loop thread."""
        with self.lock:
            self.table.reconfigure_delays()
            self.wake_touched()

    def stop(self) -> None:
        """Refuse new sequences; those under way go on until they end. Called from the event loop thread."""
        with self.lock:
            self.is_stopped = True
            self.table.reconfigure_delays()
            self.wake_touched()

    def _check(self, request: InFlightRequest, now_ns: int) -> None:
        """Raise for what no sequence could take."""
        is_new = request.sequence_start or not request.sequence_id
        is_stopped = self.is_stopped and (is_new or not self.has_sequence(request.sequence_id))
        refusal = refuse(request, self._model_name, self._statistics, now_ns, is_stopped=is_stopped)
        if refusal is not None:
            raise refusal
        try:
            self.admission.check(request)
        except InvalidArgumentError as error:
            self._record(error, request, now_ns)
            raise
        if self.rules.is_iterative and not request.sequence_id:
            request.sequence_start = True

    def _record(self, problem: ServerError, request: InFlightRequest, now_ns: int) -> None:
        """The request is refused."""
        reason = FailureReason.REJECTED if isinstance(problem, QueueFullError) else FailureReason.OTHER
        self._statistics.record_failures(reason, (now_ns - request.arrival_ns,))

    def _expiry_of(self, entry: SequenceEntry, now_ns: int) -> int | None:
        """When the request is to be looked at: a timeout counts in the backlog only, a deadline always."""
        request = entry.request
        times = []
        if request.deadline_ns is not None:
            times.append(request.deadline_ns)
        if request.timeout_us and self.table.is_backlogged(entry.sequence):
            times.append(now_ns + request.timeout_us * 1000)
        return min(times, default=None)
