"""The scheduler of models with `sequence_batching`: requests of a sequence stay on one instance, in order.

Unlike `Batcher` it has a part for each instance (`InstanceSource`), because a worker may take only from the
sequences that its instance holds. `SequenceTable` decides what moves where.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock
from modelserver.core.request import Delivery, InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import (
    CancelledError,
    InvalidArgumentError,
    QueueFullError,
    QueueTimeoutError,
    ServerError,
    UnavailableError,
)
from modelserver.scheduling.admission import DrainRate, expected_ns, refuse
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.expiry import Alarm, ExpiryTimes, LoopCalls
from modelserver.scheduling.hold import HeldSequenceTable, Hold
from modelserver.scheduling.parked_workers import WaitingWorker
from modelserver.scheduling.queue import bucket_key
from modelserver.scheduling.scheduler import QueueScheduler, ages_ns
from modelserver.scheduling.sequence import EndHook, SequenceBatch, SequenceEntry
from modelserver.scheduling.sequence_places import InstanceSlots
from modelserver.scheduling.sequence_policy import SequenceRules
from modelserver.scheduling.sequence_table import SequenceTable
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason

logger = logging.getLogger(__name__)


class SequenceBatcher(QueueScheduler):
    """Sequences, backlog and the instances' slots of one loaded model version. Each accepted request is answered once.

    `lock` guards the table, the expiry times and the parked workers; nothing is answered and no hook is called while it
    is held. `inflight` belongs to the event loop thread.
    """

    has_sequences = True

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
        """`is_fair`: callers share slots by weight. `is_adaptive`: a request that would be late is refused at once."""
        batching = config.sequence_batching
        assert batching is not None, "only models with sequence_batching have a sequence batcher"
        super().__init__(config.name, loop, statistics, clock)
        self.lock = threading.Lock()
        self.rules = SequenceRules.from_config(config)
        self.is_stopped = False
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

    def source(self, on_end: EndHook | None = None) -> InstanceSource:
        """The part of another instance, for its worker. From any thread."""
        with self.lock:
            slots = self.table.add_instance(hears_ends=on_end is not None)
            self.instances = (*self.instances, slots)
            self.wake_touched()
        return InstanceSource(self, slots, on_end)

    def submit(self, request: InFlightRequest) -> ResponseStream:
        """Queue the request in its sequence. Called from the event loop thread; answers and raises as `Batcher`.

        Also raises InvalidArgumentError (no correlation id, more than one row, or a sequence that was not begun) and
        QueueFullError (it would be late).
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
        """Stop delaying requests to fill batches. Called from the event loop thread."""
        with self.lock:
            self.table.reconfigure_delays()
            self.wake_touched()

    def stop(self) -> None:
        """Refuse new sequences; existing ones continue to their end. Called from the event loop thread."""
        with self.lock:
            self.is_stopped = True
            self.table.reconfigure_delays()
            self.wake_touched()

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Hand responses to their requests' streams. Called from the event loop thread, once per batch."""
        self._hand_over(delivery for delivery in deliveries if not delivery[0].is_padding)

    def check_idle(self) -> None:
        """Report that nothing is under way any more, once stopped including sequences. Event loop thread."""
        if self.inflight == 0 and self.on_idle is not None and (not self.is_stopped or self.num_sequences == 0):
            self.on_idle()

    def abort(self, error: ServerError) -> None:
        """Refuse all requests, answer waiting ones with `error`, and end all sequences. From any thread."""
        now_ns = self.now_ns()
        with self.lock:
            self.is_stopped = True
            self.cancel_callback = None
            dropped = self.table.clear()
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.OTHER, ages_ns(dropped, now_ns))
            self.post(self._answer, [(entry.request, error) for entry in dropped])

    def give_up(self, slots: InstanceSlots) -> None:
        """End the sequences of an instance that is removed and has waited long enough for them. From any thread."""
        now_ns = self.now_ns()
        with self.lock:
            dropped = self.table.clear_instance(slots)
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.OTHER, ages_ns(dropped, now_ns))
            error = UnavailableError(f"model '{self._model_name}': the instance of the sequence was removed")
            self.post(self._answer, [(entry.request, error) for entry in dropped])

    def wake_touched(self) -> None:
        """Wake the workers that have something new to do. Called with the lock held."""
        touched = self.table.touched
        if touched:
            for slots in self.instances:
                if slots in touched:
                    slots.wake()
            touched.clear()

    def answer_given_up(self, requests: Iterable[InFlightRequest]) -> None:
        """Answer requests that were cancelled before they were executed once more. Event loop thread."""
        requests = list(requests)
        now_ns = self.now_ns()
        self._statistics.record_failures(FailureReason.CANCELED, [now_ns - request.arrival_ns for request in requests])
        self._answer([(request, self._cancelled()) for request in requests])

    def _cancel(self, request: InFlightRequest) -> None:
        """`InFlightRequest.on_cancel`: end the whole sequence. Called from the event loop thread."""
        now_ns = self.now_ns()
        with self.lock:
            entry = self.table.find(request)
            dropped = self.table.end_early(entry, now_ns) if entry is not None else []
            self.wake_touched()
        if dropped:
            self._statistics.record_failures(FailureReason.CANCELED, ages_ns(dropped, now_ns))
            self._answer([(entry.request, self._cancelled()) for entry in dropped])
        self.check_idle()

    def _cancelled(self) -> CancelledError:
        return CancelledError(f"request to model '{self._model_name}' was cancelled, or another one of its sequence")

    def drop_expired(self, now_ns: int) -> list[tuple[SequenceEntry, ServerError]]:
        """End sequences with expired requests: their waiting requests, and the error of each. Lock held."""
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
        """Answer requests that `drop_expired` has removed. Called from the event loop thread."""
        self._answer_failed(expired, FailureReason.REJECTED, now_ns)

    def _answer_failed(
        self, failed: Sequence[tuple[SequenceEntry, ServerError]], reason: FailureReason, now_ns: int
    ) -> None:
        self._statistics.record_failures(reason, ages_ns([entry for entry, _ in failed], now_ns))
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

    def _check(self, request: InFlightRequest, now_ns: int) -> None:
        """Raise ServerError for a request that no sequence could take."""
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
        """Count the refused request as a failure."""
        reason = FailureReason.REJECTED if isinstance(problem, QueueFullError) else FailureReason.OTHER
        self._statistics.record_failures(reason, (now_ns - request.arrival_ns,))

    def _expiry_of(self, entry: SequenceEntry, now_ns: int) -> int | None:
        """When the request may expire: a timeout counts in the backlog only, a deadline always."""
        request = entry.request
        times = []
        if request.deadline_ns is not None:
            times.append(request.deadline_ns)
        if request.timeout_us and self.table.is_backlogged(entry.sequence):
            times.append(now_ns + request.timeout_us * 1000)
        return min(times, default=None)


class InstanceSource:
    """A `BatchSource` for one worker. When the worker comes back for more, it is done with what it took."""

    is_shared = False
    takes_ahead = False  # the next requests of the sequences in a batch must wait for it

    def __init__(self, batcher: SequenceBatcher, slots: InstanceSlots, on_end: EndHook | None) -> None:
        self.slots = slots
        self._batcher = batcher
        self._on_end = on_end
        self._batch: SequenceBatch | None = None

    @property
    def num_sequences(self) -> int:
        """Of this instance. From any thread."""
        return self.slots.num_sequences

    def try_take(self, worker: WaitingWorker) -> tuple[Batch | None, int | None]:
        """The next batch; or None, and when to look again if the worker is not woken. Called by the worker.

        Reports ended sequences to the instance before it sees later requests.
        """
        batcher, slots = self._batcher, self.slots
        with batcher.lock:
            self._sit_up(worker)
            now_ns = batcher.now_ns()
            expired = batcher.drop_expired(now_ns)
            rescheduled = self._batch.rescheduled if self._batch is not None else ()
            given_up = batcher.table.finish(slots, rescheduled, now_ns)
            if worker.is_closed:
                batcher.table.close_instance(slots)
            self._batch, wait_until_ns = self._form(now_ns)
            if batcher.admission.is_adaptive:
                batcher.admission.note_released(now_ns)
                if self._batch is not None and slots.queue is not None:
                    slots.rate.note(len(slots.taken), len(slots.queue), now_ns)
            ended, slots.ended = slots.ended, []
            if self._batch is None and not ended:
                worker.is_left = worker.is_closed and slots.num_sequences == 0
                self._rest(worker)
            batcher.table.touched.discard(slots)
            batcher.wake_touched()
            has_drained = batcher.is_stopped and batcher.table.num_sequences == 0
        if expired:
            batcher.post(batcher.answer_expired, expired, now_ns)
        if given_up:
            batcher.post(batcher.answer_given_up, given_up)
        if has_drained:
            batcher.post(batcher.check_idle)
        if ended and self._on_end is not None:
            for sequence_id, end in ended:
                self._on_end(sequence_id, end)
            if self._batch is None:
                return self.try_take(worker)
        return self._batch, wait_until_ns

    def _form(self, now_ns: int) -> tuple[SequenceBatch | None, int | None]:
        batcher, slots = self._batcher, self.slots
        entries, wait_until_ns = batcher.table.take(slots, now_ns)
        if not entries:
            return None, wait_until_ns
        if slots.queue is not None:
            return SequenceBatch.packed(entries, now_ns), None
        num_rows = 1 + max(slot.index for slot in slots.slots if slot.sequence is not None)
        return SequenceBatch.slotted(entries, num_rows, now_ns), None

    def _sit_up(self, worker: WaitingWorker) -> None:
        """The worker is back, woken or by itself. Called with the lock held."""
        worker.is_parked = False
        self.slots.parked = None
        if worker.is_woken:
            worker.is_woken = False
            worker.settle()

    def _rest(self, worker: WaitingWorker) -> None:
        batcher = self._batcher
        if worker.is_left:
            batcher.instances = tuple(other for other in batcher.instances if other is not self.slots)
        else:
            worker.is_parked = True
            self.slots.parked = worker

    def pass_on(self, worker: WaitingWorker) -> None:
        """Do not wake this worker for now."""
        with self._batcher.lock:
            self._sit_up(worker)

    def take_more(self, worker: WaitingWorker, limit: int) -> list[Batch]:  # noqa: ARG002
        """Nothing: the next requests of the sequences in a batch must wait for it."""
        return []

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        self._batcher.deliver(deliveries)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        self._batcher.post(callback, *args)

    def give_up(self) -> None:
        """End the sequences of the instance, which has waited long enough for them. From any thread."""
        self._batcher.give_up(self.slots)

    def close_worker(self, worker: WaitingWorker) -> None:
        """Give the instance no further sequences; its worker ends with the last one. From any thread."""
        with self._batcher.lock:
            worker.is_closed = True
            self._batcher.table.close_instance(self.slots)
            self.slots.wake()


class SequenceAdmission:
    """`max_queue_size` bounds the waiting requests (0: unbounded). `is_adaptive`: late requests are refused at once.

    All but `check` is called under the batcher's lock.
    """

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
