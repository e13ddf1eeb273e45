"""What the block tables' books notice; their moves are in the scheduler's traces."""

from __future__ import annotations

import pytest
from modelserver_backends.llm.blocks import BlockPool
from modelserver_backends.llm.kv_cache import KvManager
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import Sequence
from support.llm_integrity import check_integrity


def manager(num_blocks: int = 8) -> KvManager:
    return KvManager(BlockPool(num_blocks + 1), 4)


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(0, tokens, len(tokens), SamplingParams())


def test_a_refusal_changes_nothing() -> None:
    kv = manager()
    known = sequence(list(range(12)))
    assert kv.admit(known, [])
    kv.register(known, 12)
    kv.free(known)
    before = kv.pool.free_order()
    longer = sequence(list(range(40)))
    prefix = kv.find_prefix(longer)
    assert len(prefix) == 3
    assert not kv.admit(longer, prefix)
    assert (longer.block_ids.tolist(), longer.num_computed_tokens, kv.pool.free_order()) == ([], 0, before)
    assert (kv.num_query_tokens, kv.num_hit_tokens) == (12, 0)


def test_blocks_in_reserve_are_not_given() -> None:
    kv = manager(4)
    assert not kv.admit(sequence(list(range(12))), [], num_reserved=2)
    assert kv.admit(sequence(list(range(12))), [], num_reserved=1)


def test_extending_takes_only_what_is_missing_or_nothing() -> None:
    kv = manager(3)
    one = sequence(list(range(5)))
    assert kv.admit(one, [])
    assert kv.extend(one, 8)
    assert len(one.block_ids) == 2
    assert kv.extend(one, 9)
    assert not kv.extend(one, 13)
    assert len(one.block_ids) == 3


def test_one_sequence_can_have_all_blocks_but_the_null_block() -> None:
    kv = manager(8)
    assert (kv.most_tokens(31), kv.most_tokens(32), kv.most_tokens(33)) == (31, 32, 32)


def test_a_window_asks_for_what_is_held_at_once() -> None:
    """A window of 6 and chunks of 8 over blocks of 4: 13 tokens, which at worst begin with the last slot of a block."""
    kv = KvManager(BlockPool(9), 4, window=6, chunk_len=8)
    assert kv.most_tokens(1_000_000) == 1_000_000
    long = sequence(list(range(100)))
    assert kv.admit(long, [], num_reserved=4)
    assert len(long.block_ids) == 4
    assert not kv.admit(sequence(list(range(100, 200))), [], num_reserved=1)
    for start in range(0, 100, 8):
        assert kv.extend(long, min(start + 8, 100))
        long.num_computed_tokens = min(start + 8, 100)
        check_integrity(kv, [long])
        assert kv.pool.num_free >= 4
    whole = KvManager(BlockPool(9), 4, window=6)
    assert whole.most_tokens(33) == 32


def test_where_layers_keep_states_nothing_is_shared() -> None:
    kv = KvManager(BlockPool(9), 4, has_states=True)
    first, second = sequence(list(range(12))), sequence(list(range(12)))
    second.source = first
    assert kv.admit(first, kv.find_prefix(first))
    kv.register(first, 12)
    first.num_computed_tokens = 12
    assert kv.find_prefix(second) == []
    assert (kv.num_query_tokens, kv.num_hit_tokens) == (0, 0)
    check_integrity(kv, [first])


def test_blocks_of_a_sequence_that_nobody_knows_are_missed() -> None:
    kv = manager()
    lost = sequence(list(range(5)))
    assert kv.admit(lost, [])
    check_integrity(kv, [lost])
    with pytest.raises(AssertionError, match="do not agree with the tables"):
        check_integrity(kv, [])


def test_more_computed_than_there_is_room_for_is_noticed() -> None:
    kv = manager()
    wrong = sequence(list(range(5)))
    assert kv.admit(wrong, [])
    wrong.num_computed_tokens = 9
    with pytest.raises(AssertionError, match="has computed more than it holds"):
        check_integrity(kv, [wrong])
