"""Greedy tokens are those of transformers' generate(), whatever the batch, the blocks, the chunks and the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm import kernels
from modelserver_backends.llm.attention.sdpa import SdpaAttention
from support.generations import generate, loaded_engine, random_prompts
from support.rare_families import RARE_FAMILIES
from support.tiny_checkpoints import FAMILIES, FOREIGN_FAMILIES, reference_logprobs, reference_tokens

Checkpoints = Callable[[str], Path]
NUM_TOKENS = 12
PROMPTS = random_prompts(16)
# Longrope's factors depend on how long sequences may become; see the tests of that alone.
LENGTHS = {"phi3_longrope": 64}


@cache
def reference(directory: Path) -> list[list[int]]:
    return [reference_tokens(directory, prompt, NUM_TOKENS) for prompt in prompts_of(directory.name)]


def prompts_of(family: str) -> list[list[int]]:
    """Fewer where transformers itself computes the layers, which takes most of the time."""
    prompts = PROMPTS if family in FAMILIES else PROMPTS[:6]
    return [prompt[: LENGTHS.get(family, 128) - NUM_TOKENS] for prompt in prompts]


def _foreign(family: str) -> Any:
    """Those whose relatives run in any case are slow."""
    return pytest.param(family, marks=pytest.mark.slow) if family in ("zamba", "qwen3_5_moe") else family


@pytest.mark.parametrize("family", [*FAMILIES, *(_foreign(family) for family in FOREIGN_FAMILIES)])
def test_a_batch_equals_transformers(family: str, checkpoint: Checkpoints) -> None:
    directory, prompts = checkpoint(family), prompts_of(family)
    with loaded_engine(directory, max_model_len=LENGTHS.get(family, 128)) as engine:
        results = generate(engine, prompts, NUM_TOKENS)
    assert [tokens for tokens, _ in results] == reference(directory)
    for prompt, (tokens, logprobs) in zip(prompts[:4], results[:4], strict=True):
        expected = reference_logprobs(directory, prompt + tokens)[len(prompt) - 1 : -1]
        assert logprobs == pytest.approx(
            [float(row[token]) for row, token in zip(expected, tokens, strict=True)], abs=1e-3
        )


@pytest.mark.parametrize("family", [*FAMILIES, *(_foreign(family) for family in FOREIGN_FAMILIES)])
def test_small_blocks_chunks_and_preemptions_change_nothing(family: str, checkpoint: Checkpoints) -> None:
    directory = checkpoint(family)
    options = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 16, "num_gpu_blocks_override": 55}
    options["num_gpu_blocks_override"] = 55 if family in FAMILIES else 34
    with loaded_engine(directory, max_model_len=LENGTHS.get(family, 128), **options) as engine:
        results = generate(engine, prompts_of(family), NUM_TOKENS)
        # Where all layers have windows, sequences hold so little that there is room for all.
        assert (engine.statistics.num_preemptions > 0) == (engine.runner.window is None)
    assert [tokens for tokens, _ in results] == reference(directory)


@pytest.mark.slow
@pytest.mark.parametrize("family", RARE_FAMILIES)
def test_rare_families(family: str, checkpoint: Checkpoints) -> None:
    directory, prompts = checkpoint(family), PROMPTS[:6]
    expected = [reference_tokens(directory, prompt, NUM_TOKENS) for prompt in prompts]
    for options in ({}, {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 6}):
        with loaded_engine(directory, **options) as engine:
            assert [tokens for tokens, _ in generate(engine, prompts, NUM_TOKENS)] == expected


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("llama", "gemma2") else pytest.mark.slow)
        for family in (*FAMILIES, *FOREIGN_FAMILIES)
    ],
)
def test_without_the_kernels_in_c(family: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNELS", None)
    directory = checkpoint(family)
    options = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 16, "num_gpu_blocks_override": 55}
    with loaded_engine(directory, max_model_len=LENGTHS.get(family, 128), **options) as engine:
        attention = engine.runner._attention
        assert type(getattr(attention, "_attention", attention)) is SdpaAttention  # within that of chunks
        results = generate(engine, prompts_of(family), NUM_TOKENS)
    assert [tokens for tokens, _ in results] == reference(directory)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "bloom", "gpt_oss", "llama4", "deepseek_v3"]
)
def test_what_the_prefix_cache_gives_changes_nothing(family: str, checkpoint: Checkpoints) -> None:
    directory = checkpoint(family)
    with loaded_engine(directory, block_size=4) as engine:
        for _ in range(2):
            results = [generate(engine, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS[:5]]
            assert [tokens for tokens, _ in results] == reference(directory)[:5]
        assert engine.statistics.num_prefix_hit_tokens > 0


def test_prefixes_are_shared_within_one_step(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    prompt = PROMPTS[0] * 3
    prompts = [[*prompt[:40], *ending] for ending in ([5], [6, 7], [8], [9, 10, 11])]
    with loaded_engine(directory, block_size=8) as engine:
        results = generate(engine, prompts, NUM_TOKENS)
    assert [tokens for tokens, _ in results] == [reference_tokens(directory, prompt, NUM_TOKENS) for prompt in prompts]


def test_longrope_turns_by_its_long_factors_where_sequences_may_be_long(checkpoint: Checkpoints) -> None:
    directory = checkpoint("phi3_longrope")  # 64 positions at first, stretched to 128
    prompts = random_prompts(3, seed=1)
    prompts = [(prompt * 70)[:70] for prompt in prompts]
    with loaded_engine(directory, max_model_len=128) as engine:
        results = generate(engine, prompts, NUM_TOKENS)
    assert [tokens for tokens, _ in results] == [reference_tokens(directory, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_log_probabilities_of_a_prompt(family: str, checkpoint: Checkpoints) -> None:
    from modelserver_backends.llm.engine import GenerationRequest
    from modelserver_backends.llm.sampling_params import SamplingParams

    directory, prompt = checkpoint(family), PROMPTS[0][:40]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, ignore_eos=True)
    with loaded_engine(directory, max_num_batched_tokens=16, max_num_seqs=4) as engine:
        engine.add(GenerationRequest(prompt_token_ids=prompt, params=params))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    found = [entry for entry in outputs[0].prompt_logprobs if entry is not None]
    expected = reference_logprobs(directory, prompt)
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-3)
        best = expected[position].topk(2)
        assert [token for token, _ in entry.top[:2]] == best.indices.tolist()
