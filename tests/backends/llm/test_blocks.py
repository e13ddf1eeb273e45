"""The pool by random lives against a model of it, and what it asserts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from modelserver_backends.llm.blocks import BlockPool
from support.llm_integrity import check_integrity


class PoolLife(RuleBasedStateMachine):
    """Tables allocate, share, name and free blocks; a list that is searched says what the pool must know."""

    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.order = list(range(1, num_blocks))
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        count = min(count, len(self.order))
        expected, self.order = self.order[:count], self.order[count:]
        for block in expected:
            self.contents.pop(block, None)
        assert self.pool.allocate(count) == expected
        self.tables.append(expected)

    @rule(data=st.data(), content=st.integers(0, 3))
    @precondition(lambda self: any(self.tables))
    def register(self, data: st.DataObject, content: int) -> None:
        nameless = sorted({block for table in self.tables for block in table} - self.contents.keys())
        if nameless:
            block = data.draw(st.sampled_from(nameless))
            self.pool.register(block, bytes([content]))
            self.contents[block] = bytes([content])

    @rule(content=st.integers(0, 3))
    def share(self, content: int) -> None:
        block = self.pool.find(bytes([content]))
        holders = {block for block, known in self.contents.items() if known == bytes([content])}
        assert (block in holders) if holders else (block is None)
        if block is not None:
            assert self.pool.num_unused([block]) == (block in self.order)
            self.pool.share([block])
            if block in self.order:
                self.order.remove(block)
            self.tables.append([block])

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        held = {block for other in self.tables for block in other}
        for block in reversed(table):
            if block not in held and block not in self.order:
                self.order.insert(len(self.order) if block in self.contents else 0, block)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.contents.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        check_integrity(self.pool, self.tables)
        assert self.pool.free_order() == self.order
        assert self.pool.num_free == len(self.order)
        assert self.pool.usage == 1 - len(self.order) / self.pool.num_usable


TestPoolLife = PoolLife.TestCase


def test_a_leak_is_noticed() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    check_integrity(pool, [table])
    with pytest.raises(AssertionError, match="do not agree with the tables"):
        check_integrity(pool, [table[:1]])


def test_a_block_that_is_given_back_twice_is_noticed() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.free(table)
    with pytest.raises(AssertionError, match="but not held"):
        pool.free(table)


def test_more_than_there_is_is_not_given() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
