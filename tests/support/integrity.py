"""Assertions about the insides of queues, pools and buffers, which hold between any two calls of them.

Tests call `check_integrity` with the object; it raises AssertionError. It takes time in the number of entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from typing import Any

from modelserver.cache.local import LocalStore
from modelserver.execution.process.shared_buffer import Arena
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.fair_queue import FairQueue
from modelserver.scheduling.parked_workers import ParkedWorkers
from modelserver.scheduling.queue import RequestQueue
from modelserver.scheduling.rate_limit import Place, RateLimiter
from modelserver.scheduling.sequence_batcher import SequenceBatcher
from modelserver.scheduling.sequence_places import InstanceSlots, SequencePlaces, owner_of
from modelserver.scheduling.sequence_table import SequenceTable


@singledispatch
def check_integrity(of: object, *_details: Any, **_named: Any) -> Any:
    """The books of `of` agree."""
    raise TypeError(f"nothing is known about the insides of {type(of).__name__}")


@check_integrity.register
def _sequence_places(of: SequencePlaces) -> None:
    """Assert that no sequence waits while a slot is free."""
    has_free = any(not owner_of(slot).is_closed and slot.sequence is None for _, _, slot in of._free)
    assert not (has_free and of.backlog), "sequences wait beside free slots"


@check_integrity.register
def _sequence_table(of: SequenceTable, instances: Iterable[InstanceSlots]) -> None:
    """Assert that sequences, slots and queues agree."""
    owners = list(instances)
    bound = [sequence for sequence in of._live.values() if sequence.slot is not None]
    for sequence in of._live.values():
        assert (sequence.slot is None) == (sequence in of._backlog), "a sequence has a slot or waits for one"
        assert sequence.slot is None or sequence.slot.sequence is sequence, "two sequences in a slot"
        assert (sequence in of._idle) == (sequence.is_idle and sequence.slot is not None), "idle or not"
    waiting = sum(len(sequence.entries) for sequence in of._live.values())
    assert waiting == of.num_waiting, "the number of waiting requests is wrong"
    assert len(of._entries) == waiting + sum(len(owner.taken) for owner in owners), "a request is lost"
    assert sum(owner.num_sequences for owner in owners) == len(bound), "a count of sequences is wrong"
    for owner in owners:
        if owner.queue is not None:
            check_integrity(owner.queue)
            heads = {slot.sequence.head for slot in owner.slots if slot.sequence is not None} - {None}
            assert set(owner.queue) == heads, "the queue does not hold the first of each sequence"
    check_integrity(of.places)


@check_integrity.register
def _parked_workers(of: ParkedWorkers, *, has_requests: bool) -> None:
    """Assert that no request waits unseen."""
    assert all(worker.is_parked and not worker.is_woken for worker in of._parked), "a woken worker is parked"
    assert of._watcher is None or of._watcher in of._parked, "the watcher does not sleep"
    if has_requests and of.can_wake:
        assert of._watcher is not None, "requests wait and workers sleep without a watcher"


@check_integrity.register
def _batcher(of: Batcher) -> None:
    """Assert that queue and workers agree."""
    with of._lock:
        check_integrity(of._queue)
        check_integrity(of._idle, has_requests=len(of._queue) > 0)


@check_integrity.register
def _sequence_batcher(of: SequenceBatcher) -> None:
    """Assert that sequences, slots and workers agree."""
    with of.lock:
        check_integrity(of.table, list(of.instances))


@check_integrity.register
def _request_queue(of: RequestQueue) -> None:
    """Assert that orders, buckets and counts agree."""
    entries = list(of._all)
    assert all(entry.is_queued for entry in entries), "an entry was dropped but not removed"
    assert len(entries) == of._all.num_entries, "the number of entries is wrong"
    assert sum(entry.rows for entry in entries) == of._all.rows, "the number of rows is wrong"
    ranks = [entry.rank for entry in entries]
    assert ranks == sorted(ranks), "a lane holds an entry of another rank"
    bucketed = [entry for entry in entries if entry.key is not None and not of._keep_order]
    assert {entry.key for entry in bucketed} == of._buckets.keys(), "a bucket is missing or empty"
    for key, bucket in of._buckets.items():
        members = [entry for entry in bucketed if entry.key == key]
        assert list(bucket) == members, f"bucket {key} is out of step with the queue"
        assert bucket.num_entries == len(members), f"bucket {key} has a wrong number of entries"
        assert bucket.rows == sum(entry.rows for entry in members), f"bucket {key} has a wrong number of rows"
        assert (bucket.rows >= of._ripe_rows) == (key in of._ripe), f"bucket {key} is ripe and not, at once"
    assert of._ripe.keys() <= of._buckets.keys(), "a ripe bucket is gone"


@check_integrity.register
def _rate_limiter(of: RateLimiter) -> None:
    """Assert that resources are counted right, and that no claim waits needlessly."""
    with of._lock:
        used: dict[Place, int] = {}
        for claim in of._claims:
            assert not (claim.is_granted and claim.is_waiting), f"{claim.name} waits for what it has"
            for place, count in claim.demands.items() if claim.is_granted else ():
                used[place] = used.get(place, 0) + count
        assert used == {place: count for place, count in of._used.items() if count}, "resources are miscounted"
        # Without limits, the size shrinks as soon as the largest claim has left.
        assert not of._limits or all(count <= of._capacity(place) for place, count in used.items()), "overuse"
        before = len(of._waiting)
        of._allot()
        assert len(of._waiting) == before, "a claim waited although it could be granted"


@check_integrity.register
def _fair_queue(of: FairQueue) -> None:
    check_integrity.dispatch(RequestQueue)(of)
    entries = [entry for caller in of._callers.values() for level in caller.levels.values() for entry in level]
    assert len(entries) == len(of), "callers have more or fewer entries than the queue"
    assert set(entries) == set(of), "callers' entries are not those of the queue"
    assert sum(sum(caller.rows.values()) for caller in of._callers.values()) == of.rows, "rows of callers"


@check_integrity.register
def _local_store(of: LocalStore) -> None:
    """Assert that the accounting is consistent."""
    counts = of.counts
    assert counts.num_entries == len(of._entries) == len(of._generation_of), "entries are miscounted"
    assert counts.num_bytes == sum(entry.num_bytes for entry, _ in of._entries.values()), "bytes are miscounted"
    assert counts.num_bytes <= of._max_bytes, "more is kept than allowed"
    grouped = {digest for digests in of._by_generation.values() for digest in digests}
    assert grouped == set(of._entries), "an entry belongs to no generation"
    assert all(of._by_generation.values()), "a generation without entries is kept"


@check_integrity.register
def _arena(of: Arena) -> None:
    """Leases and gaps cover the buffer exactly once."""
    pieces = sorted([*of._leases.items(), *of._gaps])
    position = 0
    for start, end in pieces:
        assert start == position, f"hole or overlap at {position}: {pieces}"
        position = end
    assert position == of.buffer.nbytes, f"pieces end at {position}, the buffer at {of.buffer.nbytes}"
