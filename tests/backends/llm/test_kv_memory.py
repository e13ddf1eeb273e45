"""How many blocks there are, and what several engines leave to each other."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from modelserver_backends.llm.attention.kv_blocks import KvLayout
from modelserver_backends.llm.kv_memory import DeviceMemory, reserve_kv_memory
from modelserver_backends.llm.options import EngineOptions

from modelserver.backend import UnavailableError

CPU = torch.device("cpu")
SHAPE = KvLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
BLOCK_BYTES = 2 * 16 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({"max_num_seqs": 3}, 3 * 4 + 1),  # 64 tokens each, and the block of padding
        ({"num_gpu_blocks_override": 7}, 7),
        ({"kv_cache_memory_bytes": 5 * BLOCK_BYTES + 1}, 5),
        ({"kv_cache_memory_bytes": 1 << 40, "max_num_seqs": 3}, 13),
    ],
)
def test_as_many_blocks_as_the_options_say(options: dict[str, int], num_blocks: int) -> None:
    chosen = EngineOptions(block_size=16, **options)
    memory = reserve_kv_memory(SHAPE, chosen, max_model_len=64, device=CPU, what="it")
    try:
        assert memory.blocks.num_blocks == num_blocks
        assert memory.blocks.layers[0].shape == (num_blocks, 16, 2, 2, 8)
        assert SHAPE.block_bytes(16) == BLOCK_BYTES
    finally:
        memory.reservation.release()


def test_a_window_needs_the_blocks_that_are_held_at_once() -> None:
    options = EngineOptions(
        block_size=16, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=6400, kv_cache_memory_bytes=1 << 30
    )
    memory = reserve_kv_memory(SHAPE, options, max_model_len=6400, window=32, device=CPU, what="it")
    assert memory.blocks.num_blocks == 3 * 4 + 1  # 47 tokens, which begin anywhere in a block
    memory.reservation.release()


def test_a_length_that_was_asked_for_must_fit() -> None:
    options = EngineOptions(block_size=16, max_model_len=64, kv_cache_memory_bytes=4 * BLOCK_BYTES)
    with pytest.raises(UnavailableError, match=r"the LLM needs .* bytes for its KV cache"):
        reserve_kv_memory(SHAPE, options, max_model_len=64, device=CPU, what="the LLM")


def test_engines_share_what_there_is() -> None:
    memory = DeviceMemory()
    first = memory.reserve(700, available=1000, least=100, what="first")
    second = memory.reserve(700, available=1000, least=400, what="second")
    assert (first.num_bytes, second.num_bytes) == (500, 400)
    # What others do not use yet is free: the device says so, and later models are not refused for a promise.
    assert memory.reserve(700, available=1000, least=200, what="third").num_bytes == 200
    assert memory.reserve(700, available=1000, least=50, enough=300, what="fourth").num_bytes == 300
    with pytest.raises(UnavailableError, match=r"fifth needs 200 bytes, and 150 are left: unload a model"):
        memory.reserve(700, available=150, least=200, what="fifth")
    assert memory.reserve(50, available=None, least=1, what="who was told a figure").num_bytes == 50
    first.release()
    first.release()
    assert memory.reserve(1000, available=2050, least=100, what="the last").num_bytes == 550


MEASURED = """
import resource, torch
from modelserver_backends.llm.attention.kv_blocks import KvLayout
from modelserver_backends.llm.kv_memory import reserve_kv_memory
from modelserver_backends.llm.options import EngineOptions

def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

shape = KvLayout.uniform(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
device = torch.device("cpu")
before = size()
held = [
    reserve_kv_memory(shape, EngineOptions(), max_model_len=2048, device=device, what=f"model {number}")
    for number in range(14)
]
promised = sum(memory.reservation.num_bytes for memory in held)
untouched = size() - before
for layer in held[0].blocks.layers:
    layer[1:65].fill_(1)
touched = size() - before - untouched
assert all(memory.blocks.num_blocks > 64 for memory in held)
assert not held[1].blocks.layers[0][0].any()
print(promised, untouched, touched, 64 * held[0].blocks.layout.block_bytes(held[0].blocks.block_size))
"""


def test_blocks_take_memory_when_they_are_used() -> None:
    command = [sys.executable, "-c", MEASURED]
    measured = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    promised, untouched, touched, expected = map(int, measured.stdout.split())
    assert promised > 500 << 20
    assert untouched < 32 << 20
    assert expected / 2 < touched < expected + (64 << 20)


def test_what_a_gpu_has_given_is_free_no_more() -> None:
    memory = DeviceMemory(is_lazy=False)
    memory.reserve(700, available=1000, least=100, what="first").settle()
    assert memory.reserve(700, available=300, least=100, what="second").num_bytes == 300
