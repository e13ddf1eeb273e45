"""The scheduler of a model without sequences: queues requests, and forms a batch when a worker asks for one.

There is no batcher thread. Requests come from the event loop thread; a free worker takes the batch it
is about to run, so that a batch grows until it is used. Idle workers sleep until there is something
that the policy would take.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock
from modelserver.core.request import Delivery, InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import CancelledError, QueueFullError, QueueTimeoutError, ServerError
from modelserver.scheduling.admission import DrainRate, PriorityLevels, QueuePolicy, expected_ns, refuse
from modelserver.scheduling.batch import Batch, FormBatch, ResponseOrder, can_take, form_batch
from modelserver.scheduling.expiry import Alarm, ExpiryTimes, LoopCalls
from modelserver.scheduling.fair_queue import FairQueue
from modelserver.scheduling.parked_workers import ParkedWorkers, WaitingWorker
from modelserver.scheduling.places import Places
from modelserver.scheduling.policy import BatchingRules
from modelserver.scheduling.queue import QueueEntry, RequestQueue, bucket_key
from modelserver.scheduling.scheduler import QueueScheduler, ages_ns
from modelserver.scheduling.sequence import EndHook
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason

logger = logging.getLogger(__name__)


class Batcher(QueueScheduler):
    """Queue and policy of one loaded model version, and its parked workers.

    From `submit` on, every request is answered exactly once: by the code that removes its entry from the queue
    under `_lock` (a worker, a cancel, an expiry, `abort`). `_lock` guards the queue, the expiry times and
    the workers; nothing is answered while it is held. `inflight` and the order of responses belong to the
    event loop thread.
    """

    is_shared = True
    takes_ahead = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        loop: LoopCalls,
        statistics: ModelStatistics,
        clock: Clock | None = None,
        default_max_queue_size: int = 0,
        form: FormBatch = form_batch,
        places: Places | None = None,
        is_fair: bool = False,
        is_adaptive: bool = False,
    ) -> None:
        """`form` forms batches in place of the usual function: custom batching, or a test hook.

        `places` choose an instance for each request, where requests go one by one. `is_fair`: callers share the queue
        by weight. `is_adaptive`: requests that would be late are refused at once.
        """
        super().__init__(config.name, loop, statistics, clock)
        self._form = form
        self._places = places
        self._rules = BatchingRules.from_config(config)
        self._default_max_queue_size = default_max_queue_size
        self._levels = PriorityLevels(config, default_max_queue_size=default_max_queue_size)
        self._key = None if self._rules.is_single else bucket_key(config)
        self._order = ResponseOrder() if self._rules.keep_order else None
        self._lock = threading.Lock()
        self._is_fair = is_fair
        self._is_adaptive = is_adaptive
        self._rate = DrainRate()
        self._queue = self._make_queue()
        self._expiry = ExpiryTimes()
        self._idle = ParkedWorkers()
        self._is_stopped = False
        self._is_wake_due = False
        self._alarm = Alarm(loop)
        # One bound method, not one per request; `abort` lets go of it.
        self._cancel_callback: Callable[[InFlightRequest], None] | None = self._cancel

    @property
    def queue_depth(self) -> int:
        """Requests that no worker has taken yet."""
        return len(self._queue)

    @property
    def _placing(self) -> Places | None:
        """Where requests go one by one, each to its place."""
        return self._places if self._rules.is_single else None

    def source(self, on_end: EndHook | None = None) -> Batcher:  # noqa: ARG002  # there are no sequences
        """The batcher itself: all workers share its queue."""
        return self

    def give_up(self) -> None:
        """No worker waits for particular requests."""

    # One function, because this is what a request costs here.
    def submit(self, request: InFlightRequest) -> ResponseStream:  # noqa: C901
        """Queue the request. Called from the event loop thread.

        When this returns, the batcher answers the request, exactly once, on its stream. When it raises
        (UnavailableError: stopped, or queue full; CancelledError) the caller does.
        """
        now_ns = self.now_ns()
        if request.arrival_ns == 0:
            request.arrival_ns = now_ns
        deadline_ns = request.deadline_ns
        # Most requests have none of these, and the test costs less than the call.
        if self._is_stopped or request.is_cancelled or deadline_ns is not None:
            refusal = refuse(request, self._model_name, self._statistics, now_ns, is_stopped=self._is_stopped)
            if refusal is not None:
                raise refusal
        levels = self._levels
        if levels.num_levels:
            level = levels.level_of(request)
            policy = levels.policy_of(level)
        else:
            level, policy = levels.default_level, levels.default_policy
        key = self._key(request) if self._key is not None else None
        entry = QueueEntry(request, level, now_ns, key, policy.delays)
        has_timeouts = policy.allow_timeout_override or policy.default_timeout_ns
        timeout_ns = policy.timeout_ns(request) if has_timeouts else 0
        expires_ns = deadline_ns if timeout_ns == 0 else _first_expiry(now_ns, timeout_ns, deadline_ns)
        max_queue_size = policy.max_queue_size
        if expires_ns is not None and self._is_adaptive and self._queue:
            self._check_in_time(entry, deadline_ns, timeout_ns, now_ns)
        places = None if self._places is None else self._placing
        place = None if places is None else places.choose(request)
        wakes_thread = False
        dropped: QueueEntry | None = None
        with self._lock:
            # Asked again under the lock: another thread may have aborted the queue since `refuse` looked.
            is_accepted = not self._is_stopped
            if is_accepted and max_queue_size != 0 and self._is_full(level, max_queue_size):
                dropped = self._drop_for(entry)
                is_accepted = dropped is not None
            if is_accepted:
                self._queue.add(entry)
                if expires_ns is not None:
                    self._expiry.add(entry, expires_ns)
                worker = None if self._is_wake_due else self._idle.next_to_wake
                if places is not None and place is not None:
                    own = places.add(entry, place)
                    # Where it is at work, a sleeping one watches over the request.
                    worker = own if own is not None or self._idle.is_watched else worker
                if worker is not None and self._is_worth_a_wake(entry, now_ns):
                    wakes_thread = worker.wakes_after_turn
                    if not wakes_thread:
                        self._idle.wake(worker)
        if wakes_thread:
            self._is_wake_due = True
            self._loop.call_soon(self._wake_thread)
        if not is_accepted:
            raise self._rejection(request, level, policy, now_ns)
        if dropped is not None:
            self._answer([(dropped.request, self._rejection(dropped.request, level, policy, now_ns))])
        self.inflight += 1
        request.on_cancel = self._cancel_callback
        if self._order is not None:
            self._order.expect(request)
        if expires_ns is not None:
            self._alarm.set(expires_ns, now_ns, self._on_alarm)
        return request.stream

    def _wake_thread(self) -> None:
        """Called after the turn of the event loop in which a request came that is worth a wake-up.

        A thread woken at once would take only some of the requests of this turn, and contend with the loop for the
        interpreter meanwhile.
        """
        self._is_wake_due = False
        with self._lock:
            self._look_again()

    def try_take(self, worker: WaitingWorker) -> tuple[Batch | None, int | None]:
        """The next batch; or None, and the clock time at which to look again if the worker is not woken before.

        Without a batch the worker is parked or, once it is closed, left. Called by the worker.
        """
        with self._lock:
            self._idle.unpark(worker)
            now_ns = self.now_ns()
            expired = self._remove_expired(now_ns) if self._expiry else []
            batch: Batch | None = None
            wait_until_ns: int | None = None
            if self._places is not None and not worker.is_closed:
                batch, wait_until_ns = self._form_for(self._places, worker, now_ns)
            elif not worker.is_closed:
                batch, wait_until_ns = self._form(self._queue, self._rules, now_ns)
            worker.is_left = worker.is_closed
            if worker.is_left and self._places is not None:
                self._places.leave(worker)
            if batch is not None:
                num_left = len(self._queue)
                self._rate.note(len(batch.requests), num_left, now_ns)
                if num_left and self._idle.can_wake:
                    # Let one of the sleeping workers take the rest.
                    self._idle.wake_one()
            elif not worker.is_left:
                wait_until_ns = self._idle.park(worker, wait_until_ns)
            elif self._queue and self._idle.can_wake:
                self._idle.wake_one()
        if expired:
            self.post(self._answer_expired, expired, now_ns)
        return batch, wait_until_ns

    def pass_on(self, worker: WaitingWorker) -> None:
        """Skip this worker for now, and hand its wake-up to another."""
        with self._lock:
            self._idle.unpark(worker)
            worker.is_left = worker.is_closed
            if self._places is not None:
                self._places.leave(worker)
            self._look_again()

    def take_more(self, worker: WaitingWorker, limit: int) -> list[Batch]:
        """Batches that could run now, while no other worker sleeps that could run them. Called as `try_take`."""
        batches: list[Batch] = []
        with self._lock:
            now_ns = self.now_ns()
            # Where requests have places, those who sleep were woken for what is theirs.
            while (
                len(batches) < limit
                and self._queue
                and (not self._idle.can_wake or self._placing is not None)
                and not worker.is_closed
            ):
                if self._places is None:
                    batch, _ = self._form(self._queue, self._rules, now_ns)
                else:
                    batch, _ = self._form_for(self._places, worker, now_ns)
                if batch is None:
                    break
                self._rate.note(len(batch.requests), len(self._queue), now_ns)
                batches.append(batch)
        return batches

    def _form_for(self, places: Places, worker: WaitingWorker, now_ns: int) -> tuple[Batch | None, int | None]:
        """As `form_batch`, for this worker. Called with the lock held."""
        if not self._rules.is_single:
            return self._form(self._queue, self._rules, now_ns)
        places.see(worker)
        return places.take(self._queue, worker, now_ns)

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Hand responses to their requests' streams. Called from the event loop thread, once per batch."""
        if self._order is not None:
            deliveries = self._order.arrange(deliveries)
        if self._places is not None:
            deliveries = self._note_ends(self._places, deliveries)
        self._hand_over(deliveries)

    def close_worker(self, worker: WaitingWorker) -> None:
        """The worker gets no batch after the one it has; its `take` returns None. From any thread."""
        with self._lock:
            worker.is_closed = True
            if worker.is_parked:
                self._idle.wake(worker)

    def hurry(self) -> None:
        """Stop delaying requests to fill batches. Called from the event loop thread."""
        with self._lock:
            self._rules = replace(self._rules, max_delay_ns=0)
            self._look_again()

    def stop(self) -> None:
        """Refuse new requests; those in the queue are finished, without delay. Called from the event loop thread."""
        with self._lock:
            self._is_stopped = True
            self._rules = replace(self._rules, max_delay_ns=0)
            self._look_again()

    def abort(self, error: ServerError) -> None:
        """Refuse new requests, and answer those in the queue with `error`. From any thread."""
        now_ns = self.now_ns()
        with self._lock:
            self._is_stopped = True
            self._cancel_callback = None
            entries = list(self._queue)
            self._queue.remove_all(entries)
        if entries:
            self._statistics.record_failures(FailureReason.OTHER, ages_ns(entries, now_ns))
            self.post(self._answer, [(entry.request, error) for entry in entries])

    def reconfigure(self, config: ModelConfig) -> None:
        """Follow another `dynamic_batching` that preserves the same order. Without one nothing changes. Loop thread.

        Waiting requests stay: they are batched by the new rules, at the level that they would get now, and keep the
        timeout that they came with. Queue sizes apply to new requests.
        """
        if config.dynamic_batching is None:
            return
        levels = PriorityLevels(config, default_max_queue_size=self._default_max_queue_size)
        rules = BatchingRules.from_config(config)
        assert rules.keep_order == self._rules.keep_order, "the order of responses in flight cannot be changed"
        with self._lock:
            self._levels = levels
            self._rules = replace(rules, max_delay_ns=0) if self._is_stopped else rules
            waiting = list(self._queue)
            for entry in waiting:
                entry.level = levels.level_of(entry.request)
            self._queue = self._make_queue()
            for entry in sorted(waiting, key=lambda entry: entry.enqueue_ns):
                self._queue.add(entry)
            self._idle.wake_watcher()  # it sleeps until the former delay ends
            self._look_again()

    def _make_queue(self) -> RequestQueue:
        rules = self._rules
        make = FairQueue if self._is_fair else RequestQueue
        return make(max_rows=rules.max_rows, ripe_rows=rules.preferred_rows[0], keep_order=rules.keep_order)

    def _is_worth_a_wake(self, entry: QueueEntry, now_ns: int) -> bool:
        """Whether a sleeping worker would take something now that the entry has come, or has to watch its delay."""
        if self._rules.max_delay_ns == 0 or not self._idle.is_watched or self._form is not form_batch:
            return True
        if self._queue.is_mixed:
            return True  # the first of them is not to wait for others of its shape
        if not self._rules.keep_order and not self._queue.is_ripe(entry):
            return False
        return can_take(self._queue, self._rules, entry, now_ns)

    # Requests that leave the queue without being executed.

    def _is_full(self, level: int, max_queue_size: int) -> bool:
        """Whether the policy of a level admits no more requests. Called with the lock held."""
        if not 0 < max_queue_size <= len(self._queue):
            return False
        return self._queue.level_len(level) >= max_queue_size

    def _rejection(self, request: InFlightRequest, level: int, policy: QueuePolicy, now_ns: int) -> ServerError:
        stopped = refuse(request, self._model_name, self._statistics, now_ns, is_stopped=self._is_stopped)
        if stopped is not None:
            return stopped
        self._statistics.record_failures(FailureReason.REJECTED, (now_ns - request.arrival_ns,))
        where = f" at priority level {level}" if self._levels.num_levels else ""
        bound = "--max-queue-size" if policy.is_servers_bound else "max_queue_size in its config.pbtxt"
        error = QueueFullError(
            f"Exceeds maximum queue size: model '{self._model_name}' already has {policy.max_queue_size} requests "
            f"in its queue{where}; send fewer at a time, or raise {bound}"
        )
        error.retry_after_s = self._rate.retry_after_s(len(self._queue), now_ns)
        return error

    def _check_in_time(self, entry: QueueEntry, deadline_ns: int | None, timeout_ns: int, now_ns: int) -> None:
        """Raise QueueFullError for a request that would leave the queue, or be answered, when it is too late."""
        queue = self._queue
        with self._lock:
            each_ns = self._rate.per_request_ns(now_ns)
            if each_ns is None:
                return
            if isinstance(queue, FairQueue):
                num_ahead = queue.num_before(entry)
            elif self._levels.num_levels:
                num_ahead = queue.len_through(entry.level)
            else:
                num_ahead = len(queue)
        num_executing = max(0, self.inflight - len(queue))
        answer_ns = expected_ns(each_ns, num_ahead, num_executing, is_answer=True)
        wait_ns = expected_ns(each_ns, num_ahead, num_executing, is_answer=False)
        is_late = deadline_ns is not None and now_ns + answer_ns > deadline_ns
        if not is_late and (timeout_ns == 0 or entry.delays or wait_ns <= timeout_ns):
            return
        self._statistics.record_failures(FailureReason.REJECTED, (now_ns - entry.request.arrival_ns,))
        error = QueueFullError(
            f"Request timeout expired: model '{self._model_name}' cannot answer in time: {num_ahead} requests are "
            f"before this one, which take about {wait_ns / 1e6:.0f} ms; send fewer at a time, or give them more time"
        )
        error.retry_after_s = self._rate.retry_after_s(num_ahead, now_ns)
        raise error

    def _drop_for(self, entry: QueueEntry) -> QueueEntry | None:
        """Make room in a full queue by dropping the last request of a caller that has more in it. Lock held."""
        queue = self._queue
        dropped = queue.last_of_hog(entry) if isinstance(queue, FairQueue) else None
        if dropped is not None:
            queue.remove(dropped)
        return dropped

    def _cancel(self, request: InFlightRequest) -> None:
        """`InFlightRequest.on_cancel`. Called from the event loop thread."""
        with self._lock:
            entry = self._queue.find(request)
            if entry is not None:
                self._queue.remove(entry)
                self._look_again()
        if entry is not None:
            self._statistics.record_failures(FailureReason.CANCELED, ages_ns([entry], self.now_ns()))
            self._answer([(request, CancelledError(f"request to model '{self._model_name}' was cancelled"))])

    def _look_again(self) -> None:
        """Let a worker look at what is left: without an entry, others may be a batch of a preferred size. Lock held."""
        if self._queue and self._idle.can_wake:
            self._idle.wake_one()

    def _remove_expired(self, now_ns: int) -> list[QueueEntry]:
        """Remove expired entries, and move those that may be late to the end. Called with the lock held."""
        expired: list[QueueEntry] = []
        for entry in self._expiry.due(now_ns):
            deadline_ns = entry.request.deadline_ns
            is_useless = deadline_ns is not None and deadline_ns <= now_ns
            if entry.delays and not entry.is_delayed and not is_useless:
                self._queue.delay(entry)
                if deadline_ns is not None:
                    self._expiry.add(entry, deadline_ns)
            else:
                self._queue.remove(entry)
                expired.append(entry)
        return expired

    def _answer_expired(self, entries: Sequence[QueueEntry], now_ns: int) -> None:
        self._statistics.record_failures(FailureReason.REJECTED, ages_ns(entries, now_ns))
        answers: list[tuple[InFlightRequest, ServerError]] = []
        for entry in entries:
            waited_ms = (now_ns - entry.enqueue_ns) / 1e6
            message = f"Request timeout expired after {waited_ms:.3f} ms in the queue of model '{self._model_name}'"
            answers.append((entry.request, QueueTimeoutError(message)))
        self._answer(answers)

    def _answer(self, answers: Iterable[tuple[InFlightRequest, ServerError]]) -> None:
        """Answer requests that were removed from the queue. Called from the event loop thread."""
        for request, error in answers:
            response = InferResponse(error=error)
            released = self._order.forget(request) if self._order is not None else []
            deliveries: list[Delivery] = [(request, response), *released]
            self._hand_over(deliveries if self._places is None else self._note_ends(self._places, deliveries))

    def _note_ends(self, places: Places, deliveries: Iterable[Delivery]) -> list[Delivery]:
        found = list(deliveries)
        with self._lock:
            places.end(request for request, response in found if response.is_final)
        return found

    # Expiry while all workers are busy. Event loop thread only.

    def _on_alarm(self) -> None:
        now_ns = self.now_ns()
        with self._lock:
            expired = self._remove_expired(now_ns)
            next_ns = self._expiry.next_ns()
            self._look_again()
        if next_ns is not None:
            self._alarm.set(next_ns, now_ns, self._on_alarm)
        if expired:
            self._answer_expired(expired, now_ns)


def _first_expiry(now_ns: int, timeout_ns: int, deadline_ns: int | None) -> int:
    return now_ns + timeout_ns if deadline_ns is None else min(now_ns + timeout_ns, deadline_ns)
