from __future__ import annotations

import time

import numpy as np
import psutil
import pytest

from modelserver.errors import PayloadTooLargeError, UnavailableError
from modelserver.wire.assembly import FREE_BYTES, AssemblyBudget
from modelserver.wire.body import MAX_RECEIVED_BYTES, MIN_DIRECT_BYTES, BodyCollector


@pytest.mark.parametrize("content_length", [None, 6], ids=["chunked", "announced"])
@pytest.mark.parametrize("chunks", [[b"abcdef"], [b"ab", b"cdef"], [b"", b"abc", b"", b"def"]])
def test_pieces_become_one_body(content_length: int | None, chunks: list[bytes]) -> None:
    collector = BodyCollector(content_length, 0, 6)
    for chunk in chunks:
        collector.add(chunk)
    assert not collector.is_complete
    collector.finish()
    assert collector.is_complete
    assert bytes(collector.body()) == b"abcdef"


@pytest.mark.parametrize("header_length", [0, 1, 63, 64, 137])
def test_what_follows_the_header_is_aligned(header_length: int) -> None:
    collector = BodyCollector(500, header_length, 1000)
    collector.add(bytes(200))
    collector.add(bytes(300))
    body = collector.body()
    assert len(body) == 500
    assert np.frombuffer(body, np.uint8)[header_length:].ctypes.data % 64 == 0


def test_an_announced_body_over_the_limit_is_refused_before_a_byte_of_it() -> None:
    assert BodyCollector(10, 0, 10).error is None
    error = BodyCollector(11, 0, 10).error
    assert isinstance(error, PayloadTooLargeError)
    assert "--http-max-input-size" in error.message


def test_a_chunked_body_is_counted_as_it_comes() -> None:
    collector = BodyCollector(None, 0, 10)
    collector.add(bytes(10))
    assert collector.error is None
    collector.add(b"x")
    assert "request JSON size of more than 10 bytes exceeds the maximum allowed input size of 10 bytes" in str(
        collector.error
    )


def test_a_refused_body_holds_no_memory() -> None:
    collector = BodyCollector(None, 0, 10)
    for _ in range(100):
        collector.add(bytes(10))
    assert collector.body() == b""


def _receive(collector: BodyCollector, data: bytes) -> None:
    """As from a socket: so much as there is room for, as often as it takes."""
    while data:
        room = collector.room()
        assert room is not None
        count = min(len(room), len(data))
        room[:count] = data[:count]
        collector.filled(count)
        data = data[count:]


def test_the_event_loop_receives_a_little_at_a_time() -> None:
    """The kernel may hold all of a body, and one call would copy it."""
    collector = BodyCollector(64 * MAX_RECEIVED_BYTES, 0, 64 * MAX_RECEIVED_BYTES)
    for num_bytes in (1, MAX_RECEIVED_BYTES, MAX_RECEIVED_BYTES):
        room = collector.room()
        assert room is not None
        assert len(room) == MAX_RECEIVED_BYTES
        collector.filled(num_bytes)


@pytest.mark.parametrize("first", [0, 1, 100, MIN_DIRECT_BYTES])
def test_a_large_body_is_received_into_its_own_memory(first: int) -> None:
    data = bytes(range(256)) * (MIN_DIRECT_BYTES // 128)
    collector = BodyCollector(len(data), 137, len(data))
    if first:
        collector.add(memoryview(data)[:first])
    assert not collector.is_full
    _receive(collector, data[first:])
    assert collector.is_full
    collector.finish()
    body = collector.body()
    assert bytes(body) == data
    assert np.frombuffer(body, np.uint8)[137:].ctypes.data % 64 == 0


def test_a_view_is_copied_even_if_it_is_the_whole_body() -> None:
    memory = bytearray(b"abcdef")
    collector = BodyCollector(6, 0, 6)
    collector.add(memoryview(memory))
    memory[:] = b"others"
    assert bytes(collector.body()) == b"abcdef"


@pytest.mark.parametrize("length", [None, MIN_DIRECT_BYTES - 1])
def test_small_bodies_and_chunks_have_no_memory_before_they_come(length: int | None) -> None:
    assert BodyCollector(length, 0, 1 << 20).room() is None


def test_announcements_and_the_first_bytes_of_them_take_little_memory() -> None:
    before = psutil.Process().memory_info().rss
    collectors = [BodyCollector(1 << 31, 5, 1 << 31) for _ in range(100)]
    for collector in collectors:
        room = collector.room()
        assert room is not None
        room[:1000] = bytes(1000)
        collector.filled(1000)
    assert psutil.Process().memory_info().rss - before < 8 << 20


@pytest.mark.parametrize("is_announced", [True, False])
def test_long_bodies_hold_the_event_loop_for_no_longer_than_their_pieces(is_announced: bool) -> None:
    size, piece = 160 << 20, bytes(MAX_RECEIVED_BYTES - 1) + b"x"
    collector = BodyCollector(size if is_announced else None, 5, 1 << 30)
    longest_s = 0.0
    while collector.num_bytes < size:
        began_s = time.thread_time()
        collector.add(piece)
        longest_s = max(longest_s, time.thread_time() - began_s)
    began_s = time.thread_time()
    collector.finish()
    body = collector.body()
    assert max(longest_s, time.thread_time() - began_s) < 0.01
    assert len(body) == size
    assert np.array_equal(np.flatnonzero(np.frombuffer(body, np.uint8)), np.arange(len(piece) - 1, size, len(piece)))


def test_what_came_beyond_the_free_bytes_is_charged_to_the_budget() -> None:
    budget = AssemblyBudget(1000)
    collector = BodyCollector(FREE_BYTES + 1000, 0, 1 << 30, budget)
    collector.add(bytes(FREE_BYTES))
    assert budget.num_bytes == 0
    collector.add(bytes(600))
    assert budget.num_bytes == 600
    collector.add(bytes(400))
    assert budget.num_bytes == 1000
    collector.finish()
    assert budget.num_bytes == 0
    assert len(collector.body()) == FREE_BYTES + 1000


def test_over_the_budget_a_body_is_refused_and_its_memory_given_back() -> None:
    budget = AssemblyBudget(1000)
    exempt = BodyCollector(None, 0, 1 << 30, budget)
    exempt.add(bytes(FREE_BYTES + 100_000))
    collector = BodyCollector(None, 0, 1 << 30, budget)
    collector.add(bytes(FREE_BYTES + 700))
    collector.add(bytes(400))
    assert isinstance(collector.error, UnavailableError)
    assert collector.room() is None
    assert budget.num_bytes == 0
    collector.add(bytes(400))
    assert budget.num_bytes == 0
    assert exempt.error is None


def test_a_body_gives_way_to_a_faster_one_and_takes_no_more() -> None:
    told = []
    budget = AssemblyBudget(1_000_000)
    first, second = (BodyCollector(FREE_BYTES + 900_000, 0, 1 << 30, budget) for _ in range(2))
    first.on_given_up = lambda: told.append(first.error)
    first.add(bytes(FREE_BYTES + 200_000))
    room = first.room()
    assert room is not None
    second.add(bytes(FREE_BYTES + 850_000))
    (error,) = told
    assert isinstance(error, UnavailableError)
    assert first.error is error
    assert (second.error, budget.num_bytes) == (None, 850_000)
    first.filled(100)
    first.add(bytes(100))
    assert (first.room(), budget.num_bytes) == (None, 850_000)


def test_a_body_that_never_ends_is_given_up() -> None:
    budget = AssemblyBudget(1000)
    collector = BodyCollector(FREE_BYTES + 1000, 0, 1 << 30, budget)
    collector.add(bytes(FREE_BYTES + 700))
    collector.drop()
    collector.drop()
    assert budget.num_bytes == 0
