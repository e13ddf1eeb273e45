"""gRPC messages out of the pieces of a stream."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.protocol.call import RpcError
from modelserver.wire.assembly import FREE_BYTES, AssemblyBudget
from modelserver.wire.http2.message import BudgetSpentError, MessageAssembly

MIB = 1 << 20


def assembly(budget: AssemblyBudget | None = None, max_bytes: int = 1 << 31) -> MessageAssembly:
    return MessageAssembly(budget or AssemblyBudget(256 * MIB), max_bytes)


def prefixed(content: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(content).to_bytes(4, "big") + content


def read_all(found: MessageAssembly, pieces: list[bytes]) -> list[bytes]:
    """Feed pieces as a stream does; returns the messages."""
    messages = []
    for piece in pieces:
        data = memoryview(piece)
        while len(data):
            data = data[found.add(data) :]
            if found.is_complete:
                messages.append(bytes(found.take()))
    return messages


@given(st.lists(st.binary(max_size=40), max_size=5), st.lists(st.integers(0, 100)))
def test_however_the_stream_is_cut(contents: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(prefixed(content) for content in contents)
    points = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[start:end] for start, end in pairwise(points)]
    found = assembly()
    assert read_all(found, pieces) == contents
    assert not found.is_begun


@pytest.mark.parametrize("size", [16_383, 16_384, 100_000, MIB + 1])
@pytest.mark.parametrize("piece_size", [1000, 16_384, 1 << 22])
def test_large_messages(size: int, piece_size: int) -> None:
    content = np.random.default_rng(1).bytes(size)
    stream = prefixed(content)
    pieces = [stream[at : at + piece_size] for at in range(0, len(stream), piece_size)]
    budget = AssemblyBudget(256 * MIB)
    assert read_all(assembly(budget), pieces) == [content]
    assert budget.num_bytes == 0


def test_a_large_message_ends_aligned_for_its_tensors() -> None:
    found = assembly()
    content = bytes(37) + np.arange(100_000, dtype=np.float32).tobytes()
    found.add(memoryview(prefixed(content)))
    tensor = np.frombuffer(found.take(), np.float32, offset=37)
    assert tensor.flags.aligned
    assert tensor[-1] == 99_999


def test_memory_can_be_filled_directly() -> None:
    found = assembly()
    found.add(memoryview(prefixed(bytes(100_000))[:1005]))
    assert found.num_missing == 99_000
    room = found.room()
    assert room is not None
    assert len(room) == 99_000
    room[:] = b"x" * 99_000
    found.filled(99_000)
    assert found.is_complete
    assert found.room() is None
    assert bytes(found.take()) == bytes(1000) + b"x" * 99_000


def test_there_is_no_room_before_the_size_is_known() -> None:
    found = assembly()
    assert found.room() is None
    found.add(memoryview(b"\0\0"))
    assert found.room() is None
    assert found.is_begun
    assert found.num_missing == 0


def test_long_messages_hold_the_event_loop_for_no_longer_than_their_pieces() -> None:
    size, piece = 160 * MIB, memoryview(bytes(16_383) + b"x")
    found = assembly(AssemblyBudget(size))
    found.add(memoryview(b"\0" + size.to_bytes(4, "big")))
    longest_s = 0.0
    while not found.is_complete:
        began_s = time.thread_time()
        found.add(piece)
        longest_s = max(longest_s, time.thread_time() - began_s)
    assert longest_s < 0.01
    assert np.array_equal(np.flatnonzero(np.frombuffer(found.take(), np.uint8)), np.arange(16_383, size, 16_384))


@pytest.mark.parametrize(
    ("stream", "status", "text"),
    [
        (b"\2\0\0\0\1", 13, "0 or 1"),
        (b"\xff\0\0\0\0", 13, "got 255"),
        (b"\0\0\0\4\1", 8, "(1025 vs. 1024)"),
        (b"\0\xff\xff\xff\xff", 8, "(4294967295 vs. 1024)"),
    ],
)
def test_prefixes_that_are_none(stream: bytes, status: int, text: str) -> None:
    with pytest.raises(RpcError, match="message") as caught:
        assembly(max_bytes=1024).add(memoryview(stream))
    assert caught.value.status == status
    assert text in caught.value.message


def test_compressed_messages_are_marked() -> None:
    found = assembly()
    found.add(memoryview(prefixed(b"abc", flag=1)))
    assert found.is_compressed
    assert found.take() == b"abc"
    found.add(memoryview(prefixed(b"abc")))
    assert not found.is_compressed


def test_messages_share_a_budget_beyond_their_first_part() -> None:
    budget = AssemblyBudget(MIB)
    first, second = assembly(budget), assembly(budget)
    for found in (first, second):
        found.add(memoryview(prefixed(bytes(4 * MIB)))[: 5 + FREE_BYTES])
    assert budget.num_bytes == 0
    first.add(memoryview(bytes(MIB + 1)))
    second.add(memoryview(b"x"))
    assert budget.num_bytes == 1, "the first is exempt, and takes nothing away from others"
    with pytest.raises(BudgetSpentError):
        second.add(memoryview(bytes(MIB)))
    second.drop()
    assert budget.num_bytes == 0
    first.drop()
    assert budget.num_bytes == 0


def test_a_message_gives_way_to_a_faster_one_and_takes_no_more() -> None:
    told = []
    budget = AssemblyBudget(MIB)
    first, second = assembly(budget), assembly(budget)
    first.on_given_up = lambda: told.append(first)
    for found, num_bytes in ((first, 200_000), (second, 900_000)):
        found.add(memoryview(prefixed(bytes(4 * MIB)))[: 5 + FREE_BYTES])
        found.add(memoryview(bytes(num_bytes)))
    assert told == [first]
    assert budget.num_bytes == 900_000
    for take in (lambda: first.add(memoryview(b"x")), lambda: first.filled(1)):
        with pytest.raises(BudgetSpentError):
            take()
    assert first.room() is None
