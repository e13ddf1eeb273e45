"""Latent attention keeps one narrow vector of a token; `test_exactness` compares its texts with transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm.attention import cpu_attention
from modelserver_backends.llm.attention.cpu_attention import CpuAttention
from modelserver_backends.llm.kernels import KERNELS
from modelserver_backends.llm.models import latent_attention
from modelserver_backends.llm.models.latent_attention import HeadMatrices, LatentAttention
from modelserver_backends.llm.options import EngineOptions
from safetensors.torch import save_file
from support.checkpoints import network_of
from support.generations import generate, loaded_adapters, loaded_engine, random_prompts
from support.tiny_checkpoints import write_checkpoint

from modelserver.backend import InvalidArgumentError, ServerError, UnsupportedError

Checkpoints = Callable[[str], Path]


def test_what_a_token_takes(checkpoint: Checkpoints) -> None:
    """In each of two layers a latent of 24 values and a key of 8, for four heads as for one."""
    loaded = network_of(checkpoint("deepseek_v3"), EngineOptions(device="cpu", dtype="float32"))
    assert loaded.kv_layout.block_bytes(1) == 2 * (24 + 8) * 4
    forms = {layer.names[0]: layer.num_bytes for layer in loaded.layers if "kv_b" in layer.names[0]}
    assert len(forms) == 2


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_text_does_not_depend_on_what_shares_its_steps(family: str, checkpoint: Checkpoints) -> None:
    prompts = random_prompts(8, seed=5)
    with loaded_engine(checkpoint(family), max_num_batched_tokens=32, max_num_seqs=8) as engine:
        together = generate(engine, prompts, 8)
        alone = [generate(engine, [prompt], 8)[0] for prompt in prompts]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    for (_, found), (_, expected) in zip(together, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("chunk", [128, 40], ids=["whole", "chunks"])
def test_long_chunks_attend_to_what_latents_expand_to(
    family: str, chunk: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, behind what is kept, and beside sequences that decode: as few queries do, which expand nothing."""
    mixed_in_part, num_long = LatentAttention._mixed_in_part, []

    def counted(block: LatentAttention, attention: CpuAttention, *others: Any) -> torch.Tensor:
        num_long.append(len(attention.long_chunks(others[-1])))
        return mixed_in_part(block, attention, *others)

    monkeypatch.setattr(LatentAttention, "_mixed_in_part", counted)
    prompts = [list(range(5, 105)), list(range(40, 47)), list(range(30, 80))]
    found = []
    for most in (512, 12):
        monkeypatch.setattr(cpu_attention, "_MOST_QUERIES", most)
        with loaded_engine(checkpoint(family), max_num_batched_tokens=chunk, max_num_seqs=4) as engine:
            found.append(generate(engine, prompts, 6))
        assert any(num_long) is (most == 12 and KERNELS is not None)
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    for (_, few), (_, many) in zip(*found, strict=True):
        assert many == pytest.approx(few, abs=1e-4)


def test_weights_in_few_bits_are_near(checkpoint: Checkpoints) -> None:
    prompt = random_prompts(1, longest=40)[0]
    logprobs = []
    for quantization in (None, "int8"):
        with loaded_engine(checkpoint("deepseek_v2"), quantization=quantization) as engine:
            logprobs.append(generate(engine, [prompt], 1)[0][1])
    assert logprobs[1] == pytest.approx(logprobs[0], abs=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False])
def test_matrices_of_heads(dtype: torch.dtype, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_packed:
        monkeypatch.setattr(latent_attention, "packed_kernels_for", lambda _device: None)
    for stored in (torch.float32, torch.bfloat16):
        weight = torch.randn(3, 20, 9).to(stored).to(dtype)
        rows = torch.randn(5, 3, 9).to(dtype)
        expected = torch.einsum("thi,hoi->tho", rows.double(), weight.double())
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        matrices = HeadMatrices(weight)
        for count in (5, 1, 5):
            found = matrices(rows[:count])
            torch.testing.assert_close(found.double(), expected[:count], atol=tolerance, rtol=tolerance)


def test_what_does_not_go_with_it_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = checkpoint("deepseek_v2")
    with (
        pytest.raises(UnsupportedError, match="kv_cache_dtype is not supported with latent attention"),
        loaded_engine(directory, kv_cache_dtype="int8"),
    ):
        pass
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    module = "base_model.model.model.layers.0.self_attn.kv_b_proj"
    pair = {f"{module}.lora_A.weight": torch.ones(2, 24), f"{module}.lora_B.weight": torch.ones(112, 2)}
    save_file(pair, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ServerError, match="kv_b_proj"), loaded_adapters(directory, {"a": tmp_path}) as engine:
        generate(engine, [[5, 6]], 1, adapter="a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_group": 3}, "n_group 3: expected a divisor of num_experts"),
        ({"topk_group": 9}, "topk_group 9: expected 1 to n_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5: expected at most the experts of topk_group groups"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0: expected 1 or more"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7: expected an even number"),
        ({"q_lora_rank": 0}, "q_lora_rank 0: expected 1 or more, or null"),
        ({"v_head_dim": None}, "an entry that cannot be used"),
    ],
)
def test_sizes_that_no_network_has(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "deepseek_v3")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(InvalidArgumentError, match=message), loaded_engine(directory):
        pass
