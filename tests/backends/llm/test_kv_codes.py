"""Keys and values in 8 bits: tokens do not depend on how a text is computed, and take a part of the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.attention.kv_blocks import KvGroup, KvLayout, decoded, encoded
from support.generations import generate, loaded_engine, random_prompts

from modelserver.backend import UnsupportedError

Checkpoints = Callable[[str], Path]
PROMPTS = random_prompts(5)
NAMES = ["int8", "fp8"]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_does_not_depend_on_chunks_neighbours_or_what_is_cached(name: str, checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    with loaded_engine(directory, kv_cache_dtype=name, block_size=8) as engine:
        together = generate(engine, PROMPTS, 8)
        known = generate(engine, PROMPTS, 8)
        assert engine.statistics.num_prefix_hit_tokens > 0
    with loaded_engine(
        directory, kv_cache_dtype=name, block_size=8, max_num_batched_tokens=8, max_num_seqs=8
    ) as engine:
        alone = [generate(engine, [prompt], 8)[0] for prompt in PROMPTS]
    with loaded_engine(directory, kv_cache_dtype=name, attention_backend="sdpa") as engine:
        by_torch = generate(engine, PROMPTS, 8)
    for other in (known, alone, by_torch):
        assert [tokens for tokens, _ in other] == [tokens for tokens, _ in together]
        for (_, found), (_, expected) in zip(other, together, strict=True):
            # Products of other numbers of rows round differently, and that may make another code.
            assert found == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 0.02), ("fp8_e4m3", 0.15)])
def test_probabilities_stay_near_those_of_floats(name: str, tolerance: float, checkpoint: Checkpoints) -> None:
    """Of a layer that attends to all, and one that has a window."""
    directory = checkpoint("gemma2")
    prompts, found = random_prompts(8, longest=100), []
    for kv_cache_dtype in ("auto", name):
        with loaded_engine(directory, kv_cache_dtype=kv_cache_dtype) as engine:
            found.append([logprobs[0] for _, logprobs in generate(engine, prompts, 1)])
    assert found[1] == pytest.approx(found[0], abs=tolerance)
    assert found[1] != found[0]


def test_the_same_memory_has_room_for_more_tokens(checkpoint: Checkpoints) -> None:
    layout = KvLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    assert layout.block_bytes(16) / layout.coded(torch.int8).block_bytes(16) == pytest.approx(256 / 132)
    num_blocks = []
    for name in ("auto", "int8"):
        with loaded_engine(
            checkpoint("llama"), kv_cache_dtype=name, block_size=8, kv_cache_memory_bytes=100_000
        ) as engine:
            num_blocks.append(engine.cache_config["num_gpu_blocks"])
            assert engine.cache_config["cache_dtype"] == name
    assert num_blocks[1] > 2.5 * num_blocks[0]


@pytest.mark.slow
def test_ranks_and_networks_of_transformers_keep_codes_too(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    with loaded_engine(directory, kv_cache_dtype="int8") as engine:
        alone = generate(engine, PROMPTS, 6)
    with loaded_engine(directory, kv_cache_dtype="int8", tensor_parallel_size=2, num_threads=1) as engine:
        shared = generate(engine, PROMPTS, 6)
    assert [tokens for tokens, _ in shared] == [tokens for tokens, _ in alone]
    for name, tolerance in (("auto", 0.0), ("int8", 0.1)):
        with loaded_engine(checkpoint("granite"), kv_cache_dtype=name) as engine:
            found = generate(engine, PROMPTS, 1)
        if name == "auto":
            expected = found
        for (_, one), (_, other) in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=tolerance)


def test_codes_stand_for_the_nearest_value() -> None:
    values = torch.tensor([[0.0, 0.5, 127.0, -63.4], [0.0, 0.0, 0.0, 0.0], [1e-6, 448.0, -(2.0**-6), 17.0]])
    codes, scales = encoded(values, torch.int8)
    assert codes[0].tolist() == [0, 0, 127, -63]
    assert decoded(codes, scales, torch.float32)[1].tolist() == [0.0] * 4
    codes, scales = encoded(values, torch.float8_e4m3fn)
    assert decoded(codes, scales, torch.float32)[2].tolist() == [0.0, 448.0, -(2.0**-6), 16.0]


@pytest.mark.parametrize(
    "group",
    [
        KvGroup(layers=(0,), num_heads=1, key_width=576, value_width=0, dtype=torch.bfloat16),
        KvGroup(layers=(0,), num_heads=1, key_width=15, value_width=15, dtype=torch.float32),
    ],
)
def test_heads_that_are_not_kept_as_codes_are_refused(group: KvGroup) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"kv_cache_dtype (needs keys and values in heads|is not supported with latent attention)",
    ):
        KvLayout((group,)).coded(torch.int8)
