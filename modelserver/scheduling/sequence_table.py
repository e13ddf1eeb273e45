"""Which sequences exist, which slots they hold, and which of them wait for one. Knows no thread and no clock.

request -> its sequence -> a slot of an instance (or the backlog)
        -> taken by the instance's worker -> finished: the next request, or the next sequence, may be taken
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from modelserver.core.request import InFlightRequest
from modelserver.errors import InvalidArgumentError
from modelserver.scheduling.admission import DrainRate
from modelserver.scheduling.batch import form_batch
from modelserver.scheduling.policy import BatchingRules
from modelserver.scheduling.queue import BucketKey, RequestQueue
from modelserver.scheduling.sequence import LiveSequence, SequenceEnd, SequenceEntry, SequenceSlot
from modelserver.scheduling.sequence_places import InstanceSlots, SequencePlaces, owner_of
from modelserver.scheduling.sequence_policy import DirectRules, SequenceRules, SlotHead, plan_direct


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is ahead of a request: sequences that wait for a slot; then, on a known instance, waiting and executing
    requests, and the rate at which they are executed.
    """

    num_sequences: int = 0
    num_requests: int = 0
    num_executing: int = 0
    rate: DrainRate | None = None


class SequenceTable:
    """Every call is made under the batcher's lock. `touched` collects the instances whose workers should look again.

    `is_fair`: callers share slots, and turns within an instance, by weight.
    """

    def __init__(
        self,
        rules: SequenceRules,
        model_name: str,
        *,
        key: BucketKey | None,
        has_state: bool,
        is_fair: bool = False,
    ) -> None:
        self.touched: set[InstanceSlots] = set()
        self.num_waiting = 0
        self.num_conflicts = 0
        self.places = SequencePlaces(is_fair=is_fair)
        self._rules = rules
        self._oldest: BatchingRules | None = rules.oldest
        self._direct: DirectRules = rules.direct
        self._model_name = model_name
        self._key = key
        self._has_state = has_state
        self._live: dict[Hashable, LiveSequence] = {}
        self._is_fair = is_fair
        self._backlog = self.places.backlog
        self._idle: OrderedDict[LiveSequence, None] = OrderedDict()  # longest idle first
        self._entries: dict[InFlightRequest, SequenceEntry] = {}  # those that wait or are taken
        self._numbers = count(1)  # of instances
        self._iterations = count(1)

    @property
    def num_sequences(self) -> int:
        """Sequences that hold a slot or wait for one."""
        return len(self._live)

    def has_sequence(self, sequence_id: Hashable) -> bool:
        """Whether a request without START would be taken for this id."""
        sequence = self._live.get(sequence_id)
        return sequence is not None and sequence.is_open

    def add_instance(self, *, hears_ends: bool) -> InstanceSlots:
        """The slots of another instance; sequences that wait move in at once."""
        owner = InstanceSlots(self._rules, next(self._numbers), hears_ends=hears_ends, is_fair=self._is_fair)
        for slot in owner.slots:
            self._refill(slot)
        return owner

    def close_instance(self, owner: InstanceSlots) -> None:
        """Give the instance no further sequences; existing ones continue to their end."""
        owner.is_closed = True

    def add(self, request: InFlightRequest, now_ns: int) -> SequenceEntry:
        """Queue a request in its sequence. Raises InvalidArgumentError, with nothing changed, if it fits none."""
        key: Hashable = request.sequence_id
        if self._rules.is_iterative:
            number = next(self._iterations)
            key = ("iteration", number)
            request.sequence_id = request.sequence_id or number
        sequence = self._live.get(key)
        self._check_begun(request, sequence)
        if sequence is None:
            sequence = self._live[key] = LiveSequence(key, request.sequence_id, has_state=self._has_state)
            self.places.place(sequence, request)
        elif request.sequence_start and sequence.is_open:
            self.num_conflicts += 1
        entry = SequenceEntry(request, now_ns, sequence)
        entry.is_queued = True
        sequence.entries.append(entry)
        sequence.is_open = not request.sequence_end and not self._rules.is_iterative
        self._entries[request] = entry
        self.num_waiting += 1
        self._idle.pop(sequence, None)
        if sequence.slot is not None and sequence.head is entry:
            self._make_ready(sequence)
        return entry

    def check(self, request: InFlightRequest) -> None:
        """Raise InvalidArgumentError for a request that `add` would not take."""
        if not self._rules.is_iterative:
            self._check_begun(request, self._live.get(request.sequence_id))

    def _check_begun(self, request: InFlightRequest, sequence: LiveSequence | None) -> None:
        if not request.sequence_start and (sequence is None or not sequence.is_open):
            raise InvalidArgumentError(
                f"inference request for sequence {request.sequence_id} to model '{self._model_name}' must specify "
                "the START flag on the first request of the sequence"
            )

    def take(self, owner: InstanceSlots, now_ns: int) -> tuple[list[SequenceEntry], int | None]:
        """The next batch of an instance, in the order of its slots or best first; or when to look again (ns)."""
        entries, wait_until_ns = (
            self._take_direct(owner, now_ns)
            if owner.queue is None or self._oldest is None
            else self._take_oldest(owner.queue, self._oldest, now_ns)
        )
        for entry in entries:
            sequence = entry.sequence
            first = sequence.entries.popleft()
            assert first is entry, "only the first request of a sequence may be taken"
            sequence.taken = entry
            entry.is_queued = False
            self.num_waiting -= 1
            if entry.request.sequence_start and sequence.has_begun:
                self._note_end(owner, sequence, SequenceEnd.RESTARTED)
            sequence.has_begun = True
            entry.request.state = sequence.state
        owner.taken = entries
        return entries, wait_until_ns

    def finish(
        self, owner: InstanceSlots, rescheduled: Collection[InFlightRequest], now_ns: int
    ) -> list[InFlightRequest]:
        """The worker has executed the requests that it took: their sequences continue, or end.

        `rescheduled` run once more; those of them that do not, because they were cancelled, are returned.
        """
        given_up: list[InFlightRequest] = []
        taken, owner.taken = owner.taken, []
        for entry in taken:
            request, sequence = entry.request, entry.sequence
            sequence.taken = None
            if request in rescheduled and sequence.end is None:
                request.sequence_start = False
                entry.enqueue_ns = now_ns
                entry.is_queued = True
                sequence.entries.appendleft(entry)
                self.num_waiting += 1
                self._make_ready(sequence)
                continue
            del self._entries[request]
            if sequence.end is not None:
                if request in rescheduled:
                    given_up.append(request)
                self._release(sequence, sequence.end)
            elif request.sequence_end or self._rules.is_iterative:
                self._release(sequence, SequenceEnd.END)
            else:
                self._go_on(sequence, now_ns)
        return given_up

    def find(self, request: InFlightRequest) -> SequenceEntry | None:
        """The entry of a request that waits or is being executed."""
        return self._entries.get(request)

    def is_backlogged(self, sequence: LiveSequence) -> bool:
        return sequence in self._backlog

    def ahead_of(self, request: InFlightRequest) -> Ahead:
        """What is ahead of a request that arrives now, as far as that is known."""
        sequence = None if self._rules.is_iterative else self._live.get(request.sequence_id)
        slot = sequence.slot if sequence is not None else self.places.free_slot()
        if slot is None:
            return Ahead() if sequence is not None else Ahead(self._backlog.num_before(request))
        owner = owner_of(slot)
        return Ahead(0, owner.num_before(request), len(owner.taken), owner.rate)

    def make_room(self, newcomer: InFlightRequest, now_ns: int) -> list[SequenceEntry]:
        """End the last waiting sequence of a caller with more in the backlog, by weight, than the newcomer's caller.

        Returns its waiting requests, which the caller of this method answers; none if no caller has more.
        """
        sequence = self._backlog.last_of_hog(newcomer)
        if sequence is None or sequence is self._live.get(newcomer.sequence_id):
            return []
        return self.end_early(sequence.entries[-1], now_ns)

    def end_early(self, entry: SequenceEntry, now_ns: int) -> list[SequenceEntry]:
        """End the sequence of `entry`. Returns its waiting requests, which the caller answers."""
        sequence = entry.sequence
        dropped = sequence.segment(entry)
        taken = sequence.taken
        # A START begins another sequence: requests before it continue, whether queued or executing.
        is_later = bool(dropped) and (
            dropped[0] is not sequence.entries[0] or (taken is not None and dropped[0].request.sequence_start)
        )
        self._drop(dropped)
        if is_later:
            last = sequence.entries[-1] if sequence.entries else taken
            assert last is not None, "a request came before the dropped ones"
            sequence.is_open = not last.request.sequence_end
        elif taken is not None:
            sequence.end = SequenceEnd.CANCELLED
            sequence.is_open = sequence.is_open and bool(sequence.entries)
        elif sequence.has_begun or not sequence.entries:
            self._release(sequence, SequenceEnd.CANCELLED)
        else:
            self._go_on(sequence, now_ns)
        return dropped

    def end_idle(self, now_ns: int) -> None:
        """End the sequences that were idle for too long."""
        while self._idle:
            sequence = next(iter(self._idle))
            if sequence.idle_since_ns + self._rules.idle_ns > now_ns:
                break
            del self._idle[sequence]
            self._release(sequence, SequenceEnd.IDLE)

    def next_idle_ns(self, now_ns: int) -> int | None:
        """The earliest time at which a sequence may have been idle for too long; None without sequences."""
        if not self._live:
            return None
        since_ns = next(iter(self._idle)).idle_since_ns if self._idle else now_ns
        return since_ns + self._rules.idle_ns

    def clear(self) -> list[SequenceEntry]:
        """End everything at once; the requests that waited, which the caller answers."""
        for sequence in list(self._backlog):
            self._backlog.discard(sequence)
        return self._unload(list(self._live.values()))

    def clear_instance(self, owner: InstanceSlots) -> list[SequenceEntry]:
        """End the sequences of one instance; their requests that waited, which the caller answers."""
        return self._unload([slot.sequence for slot in owner.slots if slot.sequence is not None])

    def _unload(self, sequences: Sequence[LiveSequence]) -> list[SequenceEntry]:
        dropped = [entry for sequence in sequences for entry in sequence.entries]
        self._drop(dropped)
        for sequence in sequences:
            sequence.is_open = False
            if sequence.taken is not None:
                sequence.end = SequenceEnd.UNLOADED
            else:
                self._release(sequence, SequenceEnd.UNLOADED)
        return dropped

    def reconfigure_delays(self) -> None:
        """Stop delaying requests to fill batches."""
        self._direct = DirectRules()
        if self._oldest is not None:
            self._oldest = replace(self._oldest, max_delay_ns=0)
        self.touched.update(owner_of(each.slot) for each in self._live.values() if each.slot is not None)

    # Steps.

    def _take_direct(self, owner: InstanceSlots, now_ns: int) -> tuple[list[SequenceEntry], int | None]:
        heads: list[SlotHead | None] = []
        for slot in owner.slots:
            head = slot.sequence.head if slot.sequence is not None else None
            heads.append(None if head is None else SlotHead(head.enqueue_ns, head.key))
        if not any(heads):
            return [], None
        plan = plan_direct(self._direct, heads, now_ns)
        chosen = (owner.slots[index].sequence for index in plan.slots)
        return [sequence.entries[0] for sequence in chosen if sequence is not None], plan.wait_until_ns

    def _take_oldest(
        self, queue: RequestQueue, rules: BatchingRules, now_ns: int
    ) -> tuple[list[SequenceEntry], int | None]:
        batch, wait_until_ns = form_batch(queue, rules, now_ns)
        return ([] if batch is None else [self._entries[request] for request in batch.requests]), wait_until_ns

    def _refill(self, slot: SequenceSlot) -> None:
        """A slot has become free: give it to the next sequence."""
        owner = owner_of(slot)
        if owner.is_closed:
            self.touched.add(owner)  # its worker may be able to leave now
            return
        sequence = self.places.refill(slot)
        if sequence is not None and sequence.head is not None:
            self._make_ready(sequence)

    def _make_ready(self, sequence: LiveSequence) -> None:
        """The sequence has a slot and a request that may be executed."""
        slot, head = sequence.slot, sequence.head
        assert slot is not None, "only a sequence with a slot is executed"
        assert head is not None, "there is a request to execute"
        owner = owner_of(slot)
        head.key = self._key_of(sequence, head)
        if owner.queue is not None:
            owner.queue.add(head)
        self.touched.add(owner)

    def _key_of(self, sequence: LiveSequence, entry: SequenceEntry) -> Hashable:
        key = self._key(entry.request) if self._key is not None else None
        if not self._rules.has_variable_state or sequence.state is None:
            return key
        shapes = () if entry.request.sequence_start else sequence.state.shapes
        return key, shapes

    def _go_on(self, sequence: LiveSequence, now_ns: int) -> None:
        if sequence.entries:
            if sequence.slot is not None:
                self._make_ready(sequence)
        else:
            sequence.idle_since_ns = now_ns
            self._idle[sequence] = None

    def _release(self, sequence: LiveSequence, end: SequenceEnd) -> None:
        """End the sequence. The next one gets its slot; requests that follow its END begin another one."""
        del self._live[sequence.key]
        self._idle.pop(sequence, None)
        self._backlog.discard(sequence)
        if sequence.entries:
            follower = LiveSequence(sequence.key, sequence.correlation_id, has_state=self._has_state)
            follower.entries = sequence.entries
            follower.is_open = sequence.is_open
            for entry in follower.entries:
                entry.sequence = follower
            self._live[follower.key] = follower
            self._backlog.add(follower, follower.entries[0].request)
        slot = sequence.slot
        if slot is None:
            return
        if sequence.has_begun:
            self._note_end(owner_of(slot), sequence, end)
        self.places.vacate(sequence)
        self._refill(slot)

    def _note_end(self, owner: InstanceSlots, sequence: LiveSequence, end: SequenceEnd) -> None:
        if owner.hears_ends:
            owner.ended.append((sequence.correlation_id, end))
            self.touched.add(owner)

    def _drop(self, entries: Iterable[SequenceEntry]) -> None:
        """Remove these requests from their queues. The caller answers them."""
        for entry in entries:
            sequence = entry.sequence
            slot = sequence.slot
            queue = owner_of(slot).queue if slot is not None else None
            if queue is not None and queue.find(entry.request) is not None:
                queue.remove(entry)
            entry.is_queued = False
            sequence.entries.remove(entry)
            del self._entries[entry.request]
            self.num_waiting -= 1
