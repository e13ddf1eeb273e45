from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from support.integrity import check_integrity

from modelserver.execution.process.shared_buffer import ALIGNMENT, Arena, SharedBuffer


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    made = SharedBuffer.create("test")
    yield made
    made.close()


def allocated_bytes(buffer: SharedBuffer) -> int:
    return os.fstat(buffer.fd).st_blocks * 512


def test_a_second_mapping_sees_what_the_first_writes_and_follows_growth(buffer: SharedBuffer) -> None:
    other = SharedBuffer(os.dup(buffer.fd))
    buffer.grow(4096)
    buffer.view(0, 3)[:] = [1, 2, 3]
    assert other.view(0, 3).tolist() == [1, 2, 3]
    buffer.grow(1 << 20)
    buffer.view((1 << 20) - 2, 2)[:] = [8, 9]
    assert other.view((1 << 20) - 2, 2).tolist() == [8, 9]
    other.close()


def test_views_outlive_the_buffer(buffer: SharedBuffer) -> None:
    buffer.grow(4096)
    view = buffer.view(0, 8)
    view[:] = 7
    buffer.close()
    assert view.tolist() == [7] * 8


def test_a_buffer_cannot_be_truncated_under_its_readers(buffer: SharedBuffer) -> None:
    buffer.grow(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 4096)


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_GROW])
def test_a_buffer_cannot_be_sealed_against_its_owner(buffer: SharedBuffer, seal: int) -> None:
    other = SharedBuffer(os.dup(buffer.fd))
    with pytest.raises(PermissionError):
        fcntl.fcntl(other.fd, fcntl.F_ADD_SEALS, seal)
    buffer.grow(4096)
    other.close()


def test_leases_are_aligned_apart_and_reused(buffer: SharedBuffer) -> None:
    arena = Arena(buffer)
    first, second = arena.allocate(100), arena.allocate(1)
    assert first % ALIGNMENT == second % ALIGNMENT == 0
    assert second - first >= 100
    arena.free(first)
    assert arena.allocate(100) == first
    check_integrity(arena)


def test_random_leases_never_overlap(buffer: SharedBuffer) -> None:
    arena, chance = Arena(buffer), random.Random(1)
    leases: dict[int, tuple[int, int]] = {}
    for number in range(2000):
        if leases and chance.random() < 0.5:
            offset = chance.choice(list(leases))
            nbytes, mark = leases.pop(offset)
            assert np.all(buffer.view(offset, nbytes) == mark)
            arena.free(offset)
        else:
            nbytes = chance.choice([1, 63, 4096, 70_000])
            offset, mark = arena.allocate(nbytes), number % 251
            buffer.view(offset, nbytes)[:] = mark
            leases[offset] = (nbytes, mark)
        check_integrity(arena)
    assert arena.num_leases == len(leases)


def test_a_quiet_arena_gives_its_memory_back(buffer: SharedBuffer) -> None:
    arena = Arena(buffer)
    big = arena.allocate(64 << 20)
    buffer.view(big, 64 << 20)[:] = 1
    assert allocated_bytes(buffer) >= 64 << 20
    arena.trim()
    assert allocated_bytes(buffer) >= 64 << 20  # still leased
    arena.free(big)
    while arena.trim():  # a millisecond at a time
        pass
    assert allocated_bytes(buffer) <= 8 << 20
    again = arena.allocate(64 << 20)
    buffer.view(again, 64 << 20)[:] = 2
    assert np.all(buffer.view(again, 64 << 20) == 2)


def test_one_big_batch_among_small_ones_is_forgotten(buffer: SharedBuffer) -> None:
    arena = Arena(buffer)
    big = arena.allocate(32 << 20)
    buffer.view(big, 32 << 20)[:] = 1
    arena.free(big)
    for _ in range(2000):
        arena.free(arena.allocate(1 << 16))
    assert allocated_bytes(buffer) <= 8 << 20


def test_steady_big_batches_keep_their_memory(buffer: SharedBuffer) -> None:
    arena = Arena(buffer)
    written = arena.allocate(32 << 20)
    buffer.view(written, 32 << 20)[:] = 1
    arena.free(written)
    for _ in range(2000):
        arena.free(arena.allocate(32 << 20))
    assert allocated_bytes(buffer) == 32 << 20
