"""The sequences of a model, its queues and its answers: what its batcher and the sources of its workers share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import Delivery, InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import (
    CancelledError,
    QueueTimeoutError,
    ServerError,
    UnavailableError,
)
from modelserver.scheduling.alarm import Alarm
from modelserver.scheduling.bucket import bucket_key
from modelserver.scheduling.expiry import ExpiryTimes
from modelserver.scheduling.hold import HeldSequenceTable, Hold
from modelserver.scheduling.instance_slots import InstanceSlots
from modelserver.scheduling.loop_calls import LoopCalls
from modelserver.scheduling.scheduler import Scheduler
from modelserver.scheduling.sequence import SequenceEntry
from modelserver.scheduling.sequence_admission import SequenceAdmission
from modelserver.scheduling.sequence_rules import SequenceRules
from modelserver.scheduling.sequence_table import SequenceTable
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason

logger = logging.getLogger(__name__)


class SequenceQueue(Scheduler):
    """Sequences, backlog and the instances' slots of one loaded model version.

    `lock` guards the table, the expiry times and the parked workers; nothing is answered and no hook is called while it
    is held. `inflight` belongs to the event loop thread.
    """

    has_sequences = True
    inflight: int = 0

    def __init__(
        self,
        config: ModelConfig,
        *,
        loop: LoopCalls,
        statistics: ModelStatistics,
        clock: Clock | None = None,
        default_max_queue_size: int = 0,
        hold: Hold | None = None,
        is_fair: bool = False,
        is_adaptive: bool = False,
    ) -> None:
        """`is_fair`: callers share slots by weight. `is_adaptive`: who would wait too long is refused at once."""
        batching = config.sequence_batching
        assert batching is not None, "only models with sequence_batching have a sequence batcher"
        self.lock = threading.Lock()
        self.now_ns = (clock or SystemClock()).now_ns
        self.rules = SequenceRules.from_config(config)
        self.is_stopped = False
        self._model_name = config.name
        self._loop = loop
        self._statistics = statistics
        key, has_state = bucket_key(config), bool(batching.state)
        self.table = (
            SequenceTable(self.rules, config.name, key=key, has_state=has_state, is_fair=is_fair)
            if hold is None
            else HeldSequenceTable(self.rules, config.name, key=key, has_state=has_state, hold=hold, is_fair=is_fair)
        )
        self.admission = SequenceAdmission(
            self.rules, self.table, config.name, max_queue_size=default_max_queue_size, is_adaptive=is_adaptive
        )
        self._is_queue_bounded = default_max_queue_size > 0
        self.instances: tuple[InstanceSlots, ...] = ()
        self._expiry = ExpiryTimes()
        self._alarm = Alarm(loop)
        # One bound method, not one per request; `abort` lets go of it.
        self.cancel_callback: Callable[[InFlightRequest], None] | None = self._cancel

    @property
    def queue_depth(self) -> int:
        """Requests that no worker has taken yet."""
        return self.table.num_waiting

    @property
    def num_sequences(self) -> int:
        """Sequences that are under way, or wait for their turn."""
        return self.table.num_sequences

    def has_sequence(self, sequence_id: int | str) -> bool:
        """Whether a request that continues this sequence would be accepted."""
        return self.table.has_sequence(sequence_id)

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Hand responses to their requests' streams. Called from the event loop thread, once per batch."""
        num_finished = 0
        for request, response in deliveries:
            if request.is_padding:
                continue
            num_finished += response.is_final
            try:
                request.stream.deliver(response)
            except Exception:
                logger.exception("model '%s': the reader of a response failed", self._model_name)
        self.inflight -= num_finished
        self.check_idle()

    def check_idle(self) -> None:
        """Tell whoever drains that nothing is under way any more. Called from the event loop thread."""
        if self.inflight == 0 and self.on_idle is not None and (not self.is_stopped or self.num_sequences == 0):
            self.on_idle()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop thread; nobody is left to tell when the loop is closed. From any thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("model '%s': the event loop is closed, responses are dropped", self._model_name)

    def abort(self, error: ServerError) -> None:
        """Refuse everything, answer what waits with `error`, and end all sequences. From any thread."""
        now_ns = self.now_ns()
        with self.lock:
            self.is_stopped = True
            self.cancel_callback = None
            dropped = self.table.clear()
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.OTHER, _ages(dropped, now_ns))
            self.post(self._answer, [(entry.request, error) for entry in dropped])

    def give_up(self, slots: InstanceSlots) -> None:
        """End the sequences of an instance that is to go and has waited long enough for them. From any thread."""
        now_ns = self.now_ns()
        with self.lock:
            dropped = self.table.clear_instance(slots)
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.OTHER, _ages(dropped, now_ns))
            error = UnavailableError(f"model '{self._model_name}': the instance of the sequence was removed")
            self.post(self._answer, [(entry.request, error) for entry in dropped])

    def check_integrity(self) -> None:
        """Assert that sequences, slots and workers agree. For tests."""
        with self.lock:
            self.table.check_integrity(list(self.instances))

    def wake_touched(self) -> None:
        """Wake the workers that have something new to do. Called with the lock held."""
        touched = self.table.touched
        if touched:
            for slots in self.instances:
                if slots in touched:
                    slots.wake()
            touched.clear()

    def answer_given_up(self, requests: Iterable[InFlightRequest]) -> None:
        """These would have been executed once more, but were cancelled. Called from the event loop thread."""
        requests = list(requests)
        now_ns = self.now_ns()
        self._statistics.record_failures(FailureReason.CANCELED, [now_ns - request.arrival_ns for request in requests])
        self._answer([(request, self._cancelled()) for request in requests])

    def _cancel(self, request: InFlightRequest) -> None:
        """`InFlightRequest.on_cancel`: the whole sequence is given up. Called from the event loop thread."""
        now_ns = self.now_ns()
        with self.lock:
            entry = self.table.find(request)
            dropped = self.table.end_early(entry, now_ns) if entry is not None else []
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.CANCELED, _ages(dropped, now_ns))
            self._answer([(entry.request, self._cancelled()) for entry in dropped])
        self.check_idle()

    def _cancelled(self) -> CancelledError:
        return CancelledError(f"request to model '{self._model_name}' was cancelled, or another one of its sequence")

    def drop_expired(self, now_ns: int) -> list[tuple[SequenceEntry, ServerError]]:
        """Sequences whose requests are out of time: what waits of them, and why. Called with the lock held."""
        expired: list[tuple[SequenceEntry, ServerError]] = []
        for entry in self._expiry.due(now_ns):
            if not entry.is_queued or not isinstance(entry, SequenceEntry):
                continue
            deadline_ns = entry.request.deadline_ns
            if deadline_ns is not None and deadline_ns <= now_ns:
                waited_ms = (now_ns - entry.enqueue_ns) / 1e6
                text = f"Request timeout expired after {waited_ms:.3f} ms in the queue of model '{self._model_name}'"
            elif self.table.is_backlogged(entry.sequence):
                text = f"timeout of the corresponding sequence has been expired, in the backlog of '{self._model_name}'"
            else:
                if deadline_ns is not None:
                    self._expiry.add(entry, deadline_ns)
                continue
            expired += [(dropped, QueueTimeoutError(text)) for dropped in self.table.end_early(entry, now_ns)]
        return expired

    def _answer(self, answers: Iterable[tuple[InFlightRequest, ServerError]]) -> None:
        """Answer requests that were removed from the queue. Called from the event loop thread."""
        self.deliver([(request, InferResponse(error=error)) for request, error in answers])

    def answer_expired(self, expired: Sequence[tuple[SequenceEntry, ServerError]], now_ns: int) -> None:
        """These were out of time, and `drop_expired` has removed them. Called from the event loop thread."""
        self._answer_failed(expired, FailureReason.REJECTED, now_ns)

    def _answer_failed(
        self, failed: Sequence[tuple[SequenceEntry, ServerError]], reason: FailureReason, now_ns: int
    ) -> None:
        self._statistics.record_failures(reason, _ages([entry for entry, _ in failed], now_ns))
        self._answer([(entry.request, error) for entry, error in failed])

    def _on_alarm(self) -> None:
        now_ns = self.now_ns()
        with self.lock:
            expired = self.drop_expired(now_ns)
            self.table.end_idle(now_ns)
            self.wake_touched()
            times = [self._expiry.next_ns(), self.table.next_idle_ns(now_ns)]
        for when_ns in times:
            if when_ns is not None:
                self._alarm.set(when_ns, now_ns, self._on_alarm)
        if expired:
            self.answer_expired(expired, now_ns)
        self.check_idle()


def _ages(entries: Iterable[SequenceEntry], now_ns: int) -> list[int]:
    return [now_ns - entry.request.arrival_ns for entry in entries]
