"""Who computes what in the next step: one token budget for prefill chunks and decodes alike.

There are no phases. A sequence has tokens and some of them are computed; a step hands out tokens, those that run
first, until the computed ones have caught up. Pure: no clock, no device, no text.

    waiting --plan: its known tokens fit--> running --finish--> finished
       ^                                       |
       +---- plan: out of blocks (preempted) --+
"""

from __future__ import annotations

import heapq
import logging
from bisect import insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from .kv_cache import KvManager
from .lora.slots import AdapterSlots
from .plan import Chunk, SampledToken, StepPlan
from .sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)
# Of the pool, how much an admission leaves to those that run, so that it is not preempted at their next block.
WATERMARK = 0.01
# Sequences that wait for an adapter's slot: how many a plan passes over at most, and how many others are admitted
# meanwhile before nothing overtakes them any more.
_MOST_PASSED, _MOST_OVERTAKING = 64, 256
# The tokens that one chunk gave.
Sampled = tuple[SampledToken, ...]
# `Chunk(...)` in half the time, for the loop over all that decode.
_new_tuple = tuple.__new__


class Scheduler:
    """Only the engine's thread calls it: `add`, then `plan` and `update` in turn; `finish` at any time.

    With `is_by_priority` a lower `priority` goes first and is preempted last; equal ones, and all without it, go in the
    order of `arrival`. A sequence that `can_fit` is finished some day whatever the others do: when none runs, the
    first that waits is admitted, and the first that runs takes the blocks of all others before it has to wait.

    `adapters` bounds how many adapters the sequences that run have between them.
    """

    def __init__(
        self,
        kv: KvManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        is_by_priority: bool = False,
        is_chunked: bool = True,
        adapters: AdapterSlots | None = None,
    ) -> None:
        assert max_num_seqs > 0, "at least one sequence runs"
        assert max_num_batched_tokens >= max_num_seqs, "every running sequence needs a token of the budget"
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._is_by_priority = is_by_priority
        self._is_chunked = is_chunked
        self._adapters = adapters
        # How many have been admitted since one that waits for an adapter's slot was first passed over.
        self._num_overtaking = 0
        self._num_reserved = int(WATERMARK * kv.pool.num_usable)
        self._waiting = WaitingQueue(self._key)
        # Ordered by `_key`: the last is the next to be preempted.
        self._running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs))  # a heap: those that run sit as close as they can
        self.num_preemptions = 0

    @property
    def running(self) -> list[Sequence]:
        """Those that run, in their order; not to be changed."""
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def can_fit(self, num_tokens: int) -> bool:
        """Whether a sequence may grow to this many tokens; one that may not must not be added."""
        return self._kv.most_tokens(num_tokens) == num_tokens

    def add(self, sequence: Sequence) -> None:
        assert self.can_fit(sequence.max_num_tokens), f"sequence {sequence.seq_id} can never have all of its tokens"
        self._await(sequence)

    def plan(self) -> StepPlan:
        """Decide the next step, and count its tokens as computed. Blocks of all chunks are allocated."""
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        admitted: list[Sequence] = []
        budget = self._plan_running(chunks, preempted)
        if not preempted:
            self._plan_waiting(chunks, admitted, budget)
        return StepPlan(tuple(chunks), tuple(preempted), tuple(admitted))

    def _plan_running(self, chunks: list[Chunk], preempted: list[Sequence]) -> int:
        """Give tokens to those that run, the last of them losing their blocks if need be; return what is left.

        One loop with no calls for a sequence that decodes: this runs for every token of every sequence.
        """
        budget = self._max_num_batched_tokens
        block_size = self._kv.block_size
        running = self._running
        prefills: list[tuple[Sequence, int]] = []
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            start = sequence.num_computed_tokens
            placeholders = sequence.num_placeholders
            total = len(sequence.token_ids) + placeholders
            if placeholders and (sequence.is_host_bound or total >= sequence.max_num_tokens):
                index += 1
                continue
            num_tokens = total - start
            if num_tokens > budget:
                num_tokens = _whole_pictures(sequence, start, budget)
                if not num_tokens:
                    index += 1
                    continue
            if sequence.drafts and num_tokens == 1 and not placeholders:
                num_tokens += self._num_drafts(sequence, budget - (len(running) - index))
            end = start + num_tokens
            if end > len(sequence.block_ids) * block_size and not self._make_room(sequence, end, preempted):
                break
            sequence.num_computed_tokens = end
            num_sampled = 0
            if end >= total:
                num_sampled = 1 + end - total
                sequence.num_placeholders = placeholders + num_sampled
            chunks.append(_new_tuple(Chunk, (sequence, start, num_tokens, num_sampled)))
            if num_tokens > 1:
                prefills.append((sequence, start))
            budget -= num_tokens
            index += 1
        for sequence, start in prefills:
            # Nothing can drop these chunks any more, so those who are admitted to this step may share their blocks.
            self._kv.register(sequence, min(sequence.num_computed_tokens, len(sequence.token_ids)))
            self._kv.leave(sequence, start)
        return budget

    def _num_drafts(self, sequence: Sequence, most: int) -> int:
        """How many of its drafts a sequence may check, with blocks for them; they take no block that others need."""
        total = len(sequence.token_ids)
        num_drafts = min(len(sequence.drafts), most, sequence.max_num_tokens - total - 1)
        if num_drafts <= 0:
            return 0
        room = len(sequence.block_ids) * self._kv.block_size - total
        if num_drafts > room and (
            self._kv.pool.num_free <= self._num_reserved + len(self._running)
            or not self._kv.extend(sequence, total + num_drafts)
        ):
            num_drafts = max(0, room)
        return num_drafts

    def _make_room(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Get blocks for `num_tokens` tokens, from the last of those that run if none are free. False: from itself."""
        while not self._kv.extend(sequence, num_tokens):
            victim = self._running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        if (
            self.num_preemptions & (self.num_preemptions - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th, ...: seldom when it is often
            logger.warning(
                "out of KV blocks: a sequence of %d tokens waits and will be recomputed (preemption %d of this "
                "engine); more kv_cache_memory_bytes or a lower max_num_seqs avoids it",
                len(victim.token_ids),
                self.num_preemptions,
            )
        self._leave(victim)
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self._await(victim)

    def _await(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        if self._adapters is not None and sequence.adapter is not None:
            self._adapters.await_turn(sequence.adapter)

    def _plan_waiting(self, chunks: list[Chunk], admitted: list[Sequence], budget: int) -> None:
        """Admit in order while budget and blocks last; no sequence overtakes the first that does not fit.

        Those whose adapter has no slot now are passed over, until too many have overtaken them.
        """
        if self._adapters is None:
            self._admit_waiting(chunks, admitted, budget)
            return
        passed: list[Sequence] = []
        self._admit_waiting(chunks, admitted, budget, passed)
        for sequence in passed:
            self._waiting.push(sequence)
        self._num_overtaking = self._num_overtaking + len(admitted) if passed else 0

    def _lacks_slot(self, sequence: Sequence) -> bool:
        adapters, adapter = self._adapters, sequence.adapter
        return adapters is not None and adapter is not None and not adapters.can_acquire(adapter)

    def _admit_waiting(
        self, chunks: list[Chunk], admitted: list[Sequence], budget: int, passed: list[Sequence] | None = None
    ) -> None:
        """`passed` gets the sequences that are passed over; they are out of the queue then."""
        while budget and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.first()
            if sequence is not None and passed is not None and self._lacks_slot(sequence):
                if len(passed) == _MOST_PASSED or self._num_overtaking > _MOST_OVERTAKING:
                    return
                self._waiting.pop()
                passed.append(sequence)
                continue
            # After a preemption in mid-air its last token is on its way to the host.
            if sequence is None or sequence.num_placeholders:
                return
            prefix = self._kv.find_prefix(sequence)
            total = len(sequence.token_ids)
            start = len(prefix) * self._kv.block_size
            num_tokens = total - start
            if num_tokens > budget:
                num_tokens = _whole_pictures(sequence, start, budget)
                if not num_tokens or not self._is_chunked:
                    return
            if not self._kv.admit(sequence, prefix, self._num_reserved if self._running else 0):
                return
            self._waiting.pop()
            self._admit(sequence)
            admitted.append(sequence)
            sequence.num_computed_tokens = start + num_tokens
            num_sampled = int(start + num_tokens == total)
            sequence.num_placeholders += num_sampled
            self._kv.register(sequence, start + num_tokens)
            chunks.append(Chunk(sequence, start, num_tokens, num_sampled))
            budget -= num_tokens

    def _admit(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = heappop(self._free_slots)
        if self._adapters is not None and sequence.adapter is not None:
            self._adapters.end_waiting(sequence.adapter)
            sequence.adapter_slot = self._adapters.acquire(sequence.adapter)
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        running = self._running
        if running and self._key(sequence) < self._key(running[-1]):
            insort(running, sequence, key=self._key)
        else:
            running.append(sequence)

    def update(self, plan: StepPlan, sampled: Iterable[Sampled]) -> list[Sequence | None]:
        """Append what a step sampled: the tokens of each of its chunks with `num_sampled`, in their order.

        Of a chunk that gave fewer than it might have, the rest is recomputed. Returns for each of those chunks the
        sequence that has grown; None if it had ended meanwhile. The plans of an engine are updated in the order in
        which they were made. A loop with few calls for a sequence that decodes.
        """
        block_size = self._kv.block_size
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED
        results = iter(sampled)
        grown: list[Sequence | None] = []
        for sequence, start, num_tokens, num_sampled in plan.chunks:
            status = sequence.status
            end = start + num_tokens
            if num_sampled:
                tokens = next(results)
                if status is finished:
                    grown.append(None)
                    continue
                if num_sampled == 1:
                    sequence.token_ids.append(tokens[0][0])
                else:
                    num_rejected = num_sampled - len(tokens)
                    end -= num_rejected
                    if status is running:
                        sequence.num_computed_tokens -= num_rejected
                    sequence.token_ids += [token.token_id for token in tokens]
                sequence.num_placeholders -= num_sampled
                grown.append(sequence)
            if status is running and end // block_size > start // block_size:
                self._kv.register(sequence, end)
        return grown

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its blocks are free at once. A second time does nothing."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._leave(sequence)
            sequence.status = SequenceStatus.FINISHED
        elif sequence.status is SequenceStatus.WAITING:
            sequence.status = SequenceStatus.FINISHED
            self._waiting.discard()
            if self._adapters is not None and sequence.adapter is not None:
                self._adapters.end_waiting(sequence.adapter)

    def _leave(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        heappush(self._free_slots, sequence.slot)
        if self._adapters is not None and sequence.adapter is not None:
            self._adapters.release(sequence.adapter_slot)
            sequence.adapter_slot = -1

    def _key(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self._is_by_priority else 0, sequence.arrival)


def _whole_pictures(sequence: Sequence, start: int, budget: int) -> int:
    """How many of at most `budget` tokens from `start` a chunk may have, that cuts no picture which is seen whole."""
    if sequence.pictures is None:
        return budget
    return max(0, sequence.pictures.whole_until(start + budget) - start)


class WaitingQueue:
    """A heap by `key` (no two sequences have the same). Bounded by who adds: the engine's caller limits its requests.

    Who leaves is only marked, and dropped when it comes first or when the marked ones are the most.
    """

    def __init__(self, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    @property
    def num_kept(self) -> int:
        """Those that wait, and those that have left and are not dropped yet."""
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._key(sequence), sequence))

    def first(self) -> Sequence | None:
        """The sequence whose turn it is; it stays."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.status is SequenceStatus.WAITING:
                return sequence
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return None

    def pop(self) -> None:
        """Take out the one that `first` has just returned."""
        heapq.heappop(self._heap)

    def discard(self) -> None:
        """Count one that waited and has just got another status."""
        self._num_gone += 1
        if self._num_gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if self._waits(entry[1])]
            heapq.heapify(self._heap)
            self._num_gone = 0

    @staticmethod
    def _waits(sequence: Sequence) -> bool:
        return sequence.status is SequenceStatus.WAITING
