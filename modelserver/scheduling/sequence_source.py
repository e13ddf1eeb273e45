"""One instance's part of a `SequenceBatcher`: what its worker takes batches from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from modelserver.core.request import Delivery
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.instance_slots import InstanceSlots
from modelserver.scheduling.parked_workers import WaitingWorker
from modelserver.scheduling.sequence import EndHook
from modelserver.scheduling.sequence_batch import SequenceBatch
from modelserver.scheduling.sequence_queue import SequenceQueue


class InstanceSource:
    """A `BatchSource` for one worker. When the worker comes back for more, it is done with what it took."""

    is_shared = False
    takes_ahead = False  # the next requests of the sequences in a batch must wait for it

    def __init__(self, batcher: SequenceQueue, slots: InstanceSlots, on_end: EndHook | None) -> None:
        self.slots = slots
        self._batcher = batcher
        self._on_end = on_end
        self._batch: SequenceBatch | None = None

    def try_take(self, worker: WaitingWorker) -> tuple[Batch | None, int | None]:
        """The next batch; or None, and when to look again if nobody wakes the worker. Called by the worker.

        Tells the instance of sequences that ended, before it sees what comes after them.
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
        """The worker does not look for a while: nobody is to wake it."""
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
        """End the sequences of the instance, which is to go and has waited long enough for them. From any thread."""
        self._batcher.give_up(self.slots)

    def close_worker(self, worker: WaitingWorker) -> None:
        """The instance gets no further sequences, and its worker ends with the last one. From any thread."""
        with self._batcher.lock:
            worker.is_closed = True
            self._batcher.table.close_instance(self.slots)
            self.slots.wake()
