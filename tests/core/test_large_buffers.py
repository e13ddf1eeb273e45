"""Memory of large requests: never shared while a view of it lives, reused afterwards, and given back after a while."""

from __future__ import annotations

import mmap
import time

import numpy as np
import pytest

from modelserver.core.large_buffers import LargeBuffers, aligned_buffer

MIB = 1 << 20


@pytest.fixture
def buffers() -> LargeBuffers:
    return LargeBuffers(max_idle_bytes=32 * MIB, idle_s=3600)


def test_memory_is_not_lent_again_while_any_view_of_it_lives(buffers: LargeBuffers) -> None:
    tensor = np.frombuffer(buffers.take(8 * MIB).data, np.float32)[16:32].reshape(4, 4)
    tensor[:] = 1
    buffers.take(8 * MIB)[:] = 0xFF
    assert buffers.num_idle_bytes == 8 * MIB  # the second one's
    assert (tensor == 1).all()
    address = tensor.ctypes.data
    del tensor
    assert buffers.num_idle_bytes == 16 * MIB
    assert address - 64 in {taken.ctypes.data for taken in (buffers.take(8 * MIB), buffers.take(8 * MIB))}


@pytest.mark.parametrize(
    ("num_bytes", "is_reused"), [(15 * MIB, True), (8 * MIB, True), (7 * MIB, True), (4 * MIB, False)]
)
def test_a_freed_block_serves_requests_of_up_to_half_its_size(
    buffers: LargeBuffers, num_bytes: int, is_reused: bool
) -> None:
    buffers.take(16 * MIB)
    taken = buffers.take(num_bytes)
    assert len(taken) >= num_bytes
    assert (buffers.num_idle_bytes == 0) is is_reused


def test_idle_memory_is_bounded(buffers: LargeBuffers) -> None:
    lent = [buffers.take(12 * MIB) for _ in range(5)]
    lent.clear()
    assert buffers.num_idle_bytes == 24 * MIB


def test_memory_beyond_the_bound_is_not_unmapped_by_the_thread_that_frees_it() -> None:
    """That thread may be the event loop's, and 128 MiB take 12 ms."""
    lent = LargeBuffers(max_idle_bytes=0).take(128 * MIB)
    lent[:: mmap.PAGESIZE] = 1
    began_s = time.thread_time()
    del lent
    assert time.thread_time() - began_s < 0.004


def test_idle_memory_is_given_back_after_a_while() -> None:
    buffers = LargeBuffers(idle_s=0)
    lent = buffers.take(8 * MIB)
    buffers.sweep()
    assert not buffers.is_due()
    lent[:] = 1  # still there
    del lent
    assert buffers.is_due()
    buffers.sweep()
    assert buffers.num_idle_bytes == 0


@pytest.mark.parametrize("num_bytes", [100_000, 5 * MIB])
@pytest.mark.parametrize("aligned_at", [0, 1, 63, 1000])
def test_the_byte_that_was_asked_for_is_aligned(num_bytes: int, aligned_at: int) -> None:
    buffer = aligned_buffer(num_bytes, aligned_at)
    assert len(buffer) == num_bytes
    assert (np.frombuffer(buffer, np.uint8).ctypes.data + aligned_at) % 64 == 0
