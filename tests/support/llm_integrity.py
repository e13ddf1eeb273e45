"""`check_integrity` for the language models' engine, its scheduler and its blocks."""

from __future__ import annotations

from collections.abc import Iterable

from modelserver_backends.llm.blocks import NULL_BLOCK, BlockPool
from modelserver_backends.llm.engine import Engine
from modelserver_backends.llm.kv_cache import KvManager
from modelserver_backends.llm.scheduler import Scheduler, WaitingQueue
from modelserver_backends.llm.sequence import Sequence, SequenceStatus
from support.integrity import check_integrity


@check_integrity.register
def _engine(of: Engine) -> None:
    """Assert that every block is accounted for, and every sequence known to the scheduler."""
    check_integrity(of._scheduler)
    assert of._scheduler.num_running + of._scheduler.num_waiting == len(of._deliveries), "a sequence is lost"
    assert sum(len(each.running) for each in of._by_request.values()) == len(of._deliveries), (
        "a request has lost a sequence"
    )


@check_integrity.register
def _scheduler(of: Scheduler) -> None:
    """Assert that running sequences are in order and hold their blocks, and that no others hold any."""
    keys = [of._key(sequence) for sequence in of._running]
    assert keys == sorted(keys), f"those who run are out of order: {keys}"
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in of._running), "one that does not run runs"
    waiting = check_integrity(of._waiting)
    assert not any(sequence.block_ids for sequence in waiting), "one that waits holds blocks"
    assert len(of._running) <= of._max_num_seqs, "more run than may"
    slots = [*of._free_slots, *(sequence.slot for sequence in of._running)]
    assert sorted(slots) == list(range(of._max_num_seqs)), f"slots are lost or taken twice: {sorted(slots)}"
    check_integrity(of._kv, of._running)


@check_integrity.register
def _block_pool(of: BlockPool, tables: Iterable[list[int]]) -> None:
    """Assert that the pool's books agree with each other and with all block tables there are."""
    order = of.free_order()
    held = [0] * of.num_blocks
    for table in tables:
        for block in table:
            held[block] += 1
    assert held[NULL_BLOCK] == 0, "a sequence holds the null block"
    assert held == of._ref_counts, f"references {of._ref_counts} do not agree with the tables' {held}"
    assert len(order) == of.num_free, f"{len(order)} blocks are in the ring, {of.num_free} are said to be free"
    assert set(order) == {block for block in range(1, of.num_blocks) if not held[block]}, "free blocks are held"
    assert all(of._previous[of._next[block]] == block for block in [NULL_BLOCK, *order]), "the ring is torn"
    by_hash: dict[bytes, set[int]] = {}
    for block, block_hash in enumerate(of._hashes):
        if block_hash is not None:
            by_hash.setdefault(block_hash, set()).add(block)
    known = {key: {block, *of._duplicates.get(key, ())} for key, block in of._cached.items()}
    assert known == by_hash, "the map of contents does not agree with the blocks"
    assert of._duplicates.keys() <= of._cached.keys(), "duplicates of nothing"
    assert all(of._duplicates.values()), "an empty list of duplicates is kept"


@check_integrity.register
def _waiting_queue(of: WaitingQueue) -> list[Sequence]:
    """Assert that the books agree; return those who wait."""
    waiting = [sequence for _, sequence in of._heap if of._waits(sequence)]
    assert len(waiting) == len(of), f"{len(waiting)} sequences wait, {len(of)} are counted"
    return waiting


@check_integrity.register
def _kv_manager(of: KvManager, sequences: Iterable[Sequence]) -> None:
    """Assert that the pool agrees with the tables of all sequences there are, and each table with its tokens."""
    sequences = list(sequences)
    check_integrity(of.pool, [[block for block in sequence.block_ids if block != NULL_BLOCK] for sequence in sequences])
    for sequence in sequences:
        room = len(sequence.block_ids) * of.block_size
        assert sequence.num_computed_tokens <= room, f"sequence {sequence.seq_id} has computed more than it holds"
        seen = sequence.block_ids[of._first_seen(0, sequence.num_computed_tokens) :]
        assert NULL_BLOCK not in seen, f"sequence {sequence.seq_id} has given back what it still sees"
        assert sequence.num_registered_blocks * of.block_size <= sequence.num_computed_tokens, (
            f"sequence {sequence.seq_id} has made blocks findable that are not computed"
        )
