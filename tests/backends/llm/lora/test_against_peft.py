"""Greedy tokens with adapters are those of PEFT, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm import kernels
from modelserver_backends.llm.generation import GenerationRequest
from modelserver_backends.llm.lora.uses import AdapterUse
from modelserver_backends.llm.sampling_params import SamplingParams
from support.generations import generate, loaded_adapters, random_prompts
from support.gguf_models import write_gguf
from support.llm_integrity import check_integrity
from support.tiny_adapters import peft_tokens, write_adapter, write_gguf_adapter
from support.tiny_checkpoints import reference_tokens

Checkpoints = Callable[[str], Path]
NUM_TOKENS = 8
PROMPTS = random_prompts(6)
# Kinds of adapters, one after the other in one engine.
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 2, "use_rslora": True},
    "patterns": {"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"layers.0.mlp.up_proj": 3}},
    "bfloat16": {"dtype": torch.bfloat16, "target_modules": ["k_proj", "o_proj", "gate_proj"]},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "torch"])
def test_kinds_of_adapters(
    checkpoint: Checkpoints, tmp_path: Path, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(kernels, "PACKED_KERNELS", None)
    base = checkpoint("llama_tied_biased")
    places = {
        name: write_adapter(base, tmp_path / name, seed=seed, **kind) for seed, (name, kind) in enumerate(KINDS.items())
    }
    expected = {name: peft_tokens(base, place, PROMPTS, NUM_TOKENS) for name, place in places.items()}
    plain = [reference_tokens(base, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with loaded_adapters(base, places) as engine:
        for name, tokens in expected.items():
            assert [found for found, _ in generate(engine, PROMPTS, NUM_TOKENS, adapter=name)] == tokens, name
            assert tokens != plain
        names = [*places, None]
        mixed = generate(engine, PROMPTS, NUM_TOKENS, adapter=names)
    assert [found for found, _ in mixed] == [
        (plain if name is None else expected[name])[index] for index, name in enumerate(names)
    ]


@pytest.mark.parametrize("family", ["qwen2_moe", "phi3", "gpt2", "falcon_rw"])
def test_other_families(family: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Shared experts, fused layers, and weights that are stored transposed."""
    base = checkpoint(family)
    targets = {
        "qwen2_moe": ["q_proj", "o_proj"],
        "phi3": "all-linear",
        "gpt2": ["c_attn", "c_proj", "c_fc"],
        "falcon_rw": ["query_key_value", "dense_h_to_4h"],
    }[family]
    place = write_adapter(base, tmp_path / "one", target_modules=targets, fan_in_fan_out=family == "gpt2")
    with loaded_adapters(base, {"one": place}) as engine:
        found = [tokens for tokens, _ in generate(engine, PROMPTS, NUM_TOKENS, adapter="one")]
    assert found == peft_tokens(base, place, PROMPTS, NUM_TOKENS)


def test_slots_prefixes_chunks_and_preemptions_change_nothing(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    places = {f"a{seed}": write_adapter(base, tmp_path / f"a{seed}", seed=seed) for seed in range(4)}
    names = [*places, None] * 4
    prompts = [[*PROMPTS[0], 5, index % 3] for index in range(len(names))]
    with loaded_adapters(base, places, max_loras=4, enable_prefix_caching=False) as engine:
        alone = [generate(engine, [prompt], 12, adapter=name)[0] for prompt, name in zip(prompts, names, strict=True)]
    tight = {"max_loras": 2, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 16, "max_cpu_loras": 1}
    with loaded_adapters(base, places, num_gpu_blocks_override=55, **tight) as engine:
        for _ in range(2):  # the second time from the prefix cache
            found = generate(engine, prompts, 12, adapter=names)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
        assert engine.statistics.num_prefix_hit_tokens > 0
        requests = [request_of(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        for number, request in enumerate(requests):
            engine.add(request)
            engine.step()
            if number % 2:
                engine.abort(requests[number // 2])
        for request in requests:
            engine.abort(request)
        check_integrity(engine)
        slots = engine._scheduler._adapters
        assert slots is not None
        assert (sum(slots._num_holders), slots.running.total(), slots.waiting.total()) == (0, 0, 0)
        assert engine._kv.pool.usage == 0


def request_of(prompt: list[int], name: str | None) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    return GenerationRequest(list(prompt), params, adapters=() if name is None else (AdapterUse(name),))


def test_embeddings_and_sums_of_adapters(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    places = {name: write_adapter(base, tmp_path / name, seed=seed, r=2) for seed, name in enumerate("ab")}
    with loaded_adapters(base, places) as engine:
        plain, adapted = (
            engine.runner.embed(PROMPTS[:1], engine.find_adapter(uses))[0] for uses in ((), (AdapterUse("a"),))
        )
        assert not np.allclose(plain, adapted)
        both = (AdapterUse("a", 0.5), AdapterUse("b", -1.0))
        found = engine.find_adapter(both)
        assert found is not None
        assert (found.rank, found.name) == (4, "a x 0.5 and b x -1")
        assert engine.find_adapter((AdapterUse("a", 0.0),)) is None
        # As much of one as another takes away is nothing.
        none = engine.find_adapter((AdapterUse("a", 1.0), AdapterUse("a", -1.0)))
        np.testing.assert_allclose(engine.runner.embed(PROMPTS[:1], none)[0], plain, atol=1e-4)


@pytest.mark.parametrize("form", ["float", "gguf", "quantized"])
def test_gguf_adapters_and_bases(form: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A GGUF file of an adapter is as good as PEFT's, whatever form the base has."""
    base = checkpoint("llama")
    place = write_adapter(base, tmp_path / "one")
    places = {"peft": place, "gguf": write_gguf_adapter(base, place, tmp_path / "one.gguf")}
    expected = peft_tokens(base, place, PROMPTS, NUM_TOKENS)
    options = {"quantization": "int8"} if form == "quantized" else {}
    source = write_gguf(base, tmp_path / "base.gguf") if form == "gguf" else base
    with loaded_adapters(source, places, **options) as engine:
        found = {name: [tokens for tokens, _ in generate(engine, PROMPTS, NUM_TOKENS, adapter=name)] for name in places}
    assert found["peft"] == found["gguf"]
    if form != "quantized":  # codes of 8 bits may tip the balance between two tokens
        assert found["peft"] == expected


def test_two_ranks_have_their_shares_of_an_adapter(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Also of DoRA's lengths and of biases, and of what is embedded."""
    base = checkpoint("llama_tied_biased")
    places = {
        "plain": write_adapter(base, tmp_path / "plain"),
        "dora": write_adapter(base, tmp_path / "dora", seed=1, use_dora=True),
    }
    names = ["plain", "dora", None] * 2
    found = []
    for size in (1, 2):
        with loaded_adapters(base, places, tensor_parallel_size=size, num_threads=1) as engine:
            tokens = [each for each, _ in generate(engine, PROMPTS, NUM_TOKENS, adapter=names)]
            found.append((tokens, engine.runner.embed(PROMPTS[:2], engine.find_adapter((AdapterUse("dora"),)))))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)
