"""The scheduler of models with `sequence_batching`: requests of a sequence stay on one instance, in order.

Unlike `Batcher` it has a part for each instance (`InstanceSource`), because a worker may take only from the
sequences that its instance holds. What moves where is decided by `SequenceTable`; here are the lock, the
seats, the clock and the answers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import Delivery, InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.stream import ResponseStream
from modelserver.errors import (
    CancelledError,
    InvalidArgumentError,
    QueueFullError,
    QueueTimeoutError,
    ServerError,
    UnavailableError,
)
from modelserver.scheduling.alarm import Alarm
from modelserver.scheduling.bucket import bucket_key
from modelserver.scheduling.expiry import ExpiryTimes
from modelserver.scheduling.hold import HeldSequenceTable, Hold
from modelserver.scheduling.loop_calls import LoopCalls
from modelserver.scheduling.refusal import refuse
from modelserver.scheduling.sequence import SequenceEntry
from modelserver.scheduling.sequence_admission import SequenceAdmission
from modelserver.scheduling.sequence_rules import SequenceRules
from modelserver.scheduling.sequence_source import InstanceSource
from modelserver.scheduling.sequence_table import EndHook, SequenceTable
from modelserver.telemetry.statistics import FailureReason, ModelStatistics

logger = logging.getLogger(__name__)


class SequenceBatcher:
    """Sequences, backlog and the instances' parts of one loaded model version.

    As with `Batcher`, every accepted request is answered exactly once. `lock` guards the table, the expiry times
    and the seats; nothing is answered and no hook is called while it is held. `inflight`
    belongs to the event loop thread.
    """

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
        self.inflight = 0
        self.on_idle: Callable[[], None] | None = None
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
        self._sources: tuple[InstanceSource, ...] = ()
        self._expiry = ExpiryTimes()
        self._alarm = Alarm(loop)
        # One bound method, not one per request; `abort` lets go of it.
        self._cancel_callback: Callable[[InferRequest], None] | None = self._cancel

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

    def add_instance(self, on_end: EndHook | None = None) -> InstanceSource:
        """The part of another instance, for its worker; `on_end` is called from that worker's thread. Any thread."""
        with self.lock:
            source = InstanceSource(self, self.table.add_instance(hears_ends=on_end is not None), on_end)
            self._sources = (*self._sources, source)
            self.wake_touched()
        return source

    def remove_instance(self, source: InstanceSource) -> None:
        """Its worker has left. Called with the lock held."""
        self._sources = tuple(other for other in self._sources if other is not source)

    def submit(self, request: InferRequest) -> ResponseStream:
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
        request.on_cancel = self._cancel_callback
        self._alarm.set(now_ns + self.rules.idle_ns, now_ns, self._on_alarm)
        if expires_ns is not None:
            self._alarm.set(expires_ns, now_ns, self._on_alarm)
        return request.stream

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

    def abort(self, error: ServerError) -> None:
        """Refuse everything, answer what waits with `error`, and end all sequences. From any thread."""
        now_ns = self.now_ns()
        with self.lock:
            self.is_stopped = True
            self._cancel_callback = None
            dropped = self.table.clear()
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.OTHER, _ages(dropped, now_ns))
            self.post(self._answer, [(entry.request, error) for entry in dropped])

    def give_up(self, source: InstanceSource) -> None:
        """End the sequences of an instance that is to go and has waited long enough for them. From any thread."""
        now_ns = self.now_ns()
        with self.lock:
            dropped = self.table.clear_instance(source.slots)
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.OTHER, _ages(dropped, now_ns))
            error = UnavailableError(f"model '{self._model_name}': the instance of the sequence was removed")
            self.post(self._answer, [(entry.request, error) for entry in dropped])

    def check_integrity(self) -> None:
        """Assert that sequences, slots and seats agree. For tests."""
        with self.lock:
            self.table.check_integrity([source.slots for source in self._sources])

    def wake_touched(self) -> None:
        """Wake the workers that have something new to do. Called with the lock held."""
        touched = self.table.touched
        if touched:
            for source in self._sources:
                if source.slots in touched:
                    source.wake()
            touched.clear()

    def answer_given_up(self, requests: Iterable[InferRequest]) -> None:
        """These would have been executed once more, but were cancelled. Called from the event loop thread."""
        requests = list(requests)
        now_ns = self.now_ns()
        self._statistics.record_failures(FailureReason.CANCELED, [now_ns - request.arrival_ns for request in requests])
        self._answer([(request, self._cancelled()) for request in requests])

    # Requests that are refused, or leave their queue without being executed.

    def _check(self, request: InferRequest, now_ns: int) -> None:
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

    def _record(self, problem: ServerError, request: InferRequest, now_ns: int) -> None:
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

    def _cancel(self, request: InferRequest) -> None:
        """`InferRequest.on_cancel`: the whole sequence is given up. Called from the event loop thread."""
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

    def _answer(self, answers: Iterable[tuple[InferRequest, ServerError]]) -> None:
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

    # Expiry and idle sequences, while all workers are busy. Event loop thread only.

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
