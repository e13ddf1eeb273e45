from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.batching import request
from support.integrity import check_integrity

from modelserver.scheduling.queue import QueueEntry, RequestQueue


def entry(rows: int = 1, level: int = 1, key: Any = None, enqueue_ns: int = 0) -> QueueEntry:
    return QueueEntry(request(rows), level, enqueue_ns, key)


def filled(*entries: QueueEntry, **fields: Any) -> RequestQueue:
    queue = RequestQueue(**{"max_rows": 8, "ripe_rows": 4, **fields})
    for each in entries:
        queue.add(each)
    check_integrity(queue)
    return queue


def test_order_is_level_then_delay_then_arrival() -> None:
    entries = [entry(level=level) for level in (2, 1, 2, 1)]
    queue = filled(*entries)
    queue.delay(entries[1])
    check_integrity(queue)
    assert list(queue) == [entries[3], entries[1], entries[0], entries[2]]
    assert queue.first() is entries[3]
    assert (queue.level_len(1), queue.level_len(2), queue.level_len(3)) == (2, 2, 0)


def test_candidates_share_a_key() -> None:
    entries = [entry(key=key) for key in ("a", "b", "a")]
    queue = filled(*entries)
    assert queue.candidates(queue.bucket_of(entries[0])) == ([entries[0], entries[2]], True), "another waits behind it"


def test_with_order_another_key_closes_the_candidates() -> None:
    entries = [entry(key=key) for key in ("a", "a", "b", "a")]
    queue = filled(*entries, keep_order=True)
    assert queue.candidates(queue.bucket_of(entries[0])) == (entries[:2], True)


def test_candidates_end_when_the_batch_is_full() -> None:
    entries = [entry(3) for _ in range(3)] + [entry(2), entry(1)]
    queue = filled(*entries)
    assert queue.candidates(queue.bucket_of(entries[0])) == (entries[:4], False)


def test_search_past_misfits_is_bounded() -> None:
    entries = [entry(7)] + [entry(2) for _ in range(1000)] + [entry(1)]
    queue = filled(*entries)
    assert len(queue.candidates(queue.bucket_of(entries[0]))[0]) < 100


def test_heads_lead_and_ripe_buckets_follow() -> None:
    first, second = entry(key="a", enqueue_ns=1), entry(key="b", enqueue_ns=2)
    urgent = entry(key="d", level=0, enqueue_ns=5)
    ripe = [entry(2, key="c", enqueue_ns=3), entry(2, key="c", enqueue_ns=4)]
    queue = filled(first, second, *ripe, urgent)
    assert queue.heads() == [urgent, first, ripe[0]]
    queue.remove(ripe[1])
    assert queue.heads() == [urgent, first]


def test_oldest_counts_over_all_levels() -> None:
    urgent, old = entry(level=1, enqueue_ns=5), entry(level=2, enqueue_ns=3)
    queue = filled(urgent, old)
    assert queue.bucket_of(urgent).oldest_ns() == 3


def test_find_knows_queued_requests_only() -> None:
    known = entry(level=3)
    queue = filled(entry(), known)
    assert queue.find(known.request) is known
    queue.remove(known)
    assert queue.find(known.request) is None
    assert not known.is_queued


def test_all_can_leave_at_once_and_others_come_after_them() -> None:
    entries = [entry(2, level, key) for level in (2, 1) for key in ("a", "b", None)]
    queue = filled(*entries)
    queue.remove_all(list(queue))
    check_integrity(queue)
    assert (len(queue), queue.rows, queue.heads()) == (0, 0, [])
    assert not any(each.is_queued for each in entries)
    late = entry(level=3, key="a")
    queue.add(late)
    check_integrity(queue)
    assert queue.heads() == [late]


def test_integrity_check_notices_a_lost_entry() -> None:
    queue = filled(entry(key="a"), entry(key="a"))
    queue._all.num_entries -= 1
    with pytest.raises(AssertionError, match="number of entries"):
        check_integrity(queue)


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of operations keeps order, buckets and counts in step with a plain list."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue(max_rows=8, ripe_rows=4)
        self.model: list[QueueEntry] = []
        self.now_ns = 0

    @rule(target=entries, rows=st.integers(1, 8), level=st.integers(1, 3), key=st.sampled_from(["a", "b", "c"]))
    def add(self, rows: int, level: int, key: str) -> QueueEntry:
        self.now_ns += 1
        added = entry(rows, level, key, self.now_ns)
        self.queue.add(added)
        self.model.append(added)
        return added

    @rule(removed=consumes(entries))
    def remove(self, removed: QueueEntry) -> None:
        if removed.is_queued:
            self.queue.remove(removed)
            self.model.remove(removed)

    @rule(late=entries)
    def delay(self, late: QueueEntry) -> None:
        if late.is_queued and not late.is_delayed:
            self.queue.delay(late)
            self.model.remove(late)
            self.model.append(late)

    @rule()
    def take_candidates_of_the_head(self) -> None:
        head = self.queue.first()
        if head is not None:
            taken, _ = self.queue.candidates(self.queue.bucket_of(head))
            assert {each.key for each in taken} == {head.key}
            assert head in taken
            self.queue.remove_all(taken)
            self.model = [each for each in self.model if each not in taken]

    @invariant()
    def agrees(self) -> None:
        check_integrity(self.queue)
        assert list(self.queue) == sorted(self.model, key=lambda each: each.rank)
        assert self.queue.rows == sum(each.rows for each in self.model)
        assert len(self.queue) == len(self.model)


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestQueueMachine = QueueMachine.TestCase
