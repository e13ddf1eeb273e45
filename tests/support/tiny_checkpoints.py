"""Tiny random checkpoints of every family of networks, made by transformers' own classes, and what it says of them.

Weights are drawn wide, norms and biases away from one and zero, so that greedy tokens do not hang on a tie and
nothing that a network does can be left out unnoticed. Sliding windows are shorter than the prompts of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from support.rare_families import LATENT, RARE_FAMILIES
from support.stateful_families import STATEFUL_FAMILIES

VOCAB_SIZE = 384
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WINDOW = 11
_LONG_FACTORS = [1.0 + 0.5 * i for i in range(8)]
_SHORT_FACTORS = [1.0 + 0.1 * i for i in range(8)]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **values}}


@dataclass(frozen=True)
class Family:
    """`model_type` as transformers registers it. `values` change or (None) remove entries of the common config."""

    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)


# Of configs that have other names for sizes, or fewer of them.
_OLD: dict[str, Any] = {
    **dict.fromkeys(("head_dim", "num_key_value_heads", "intermediate_size")),
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "llama_tied_biased": Family("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": Family("llama", _rope("linear", factor=2.0)),
    "llama_dynamic": Family("llama", _rope("dynamic", factor=2.0)),
    "llama3": Family(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_yarn": Family("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral": Family("mistral", {"sliding_window": _WINDOW}),
    "qwen2": Family("qwen2"),
    "qwen2_window": Family("qwen2", {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1}),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": Family("gemma2", {"sliding_window": _WINDOW, "tie_word_embeddings": True, "query_pre_attn_scalar": 24}),
    "gemma3": Family(
        "gemma3_text",
        {
            "sliding_window": _WINDOW,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": Family("phi3", {"hidden_size": 64, "head_dim": None, "sliding_window": _WINDOW}),
    "phi3_longrope": Family(
        "phi3",
        {
            "hidden_size": 64,
            "head_dim": None,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 64,
            **_rope("longrope", long_factor=_LONG_FACTORS, short_factor=_SHORT_FACTORS),
        },
    ),
    "phi4_mini": Family(
        "phi3",
        {
            "hidden_size": 64,
            "head_dim": None,
            "tie_word_embeddings": True,
            **_rope("default", partial_rotary_factor=0.75),
        },
    ),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": _WINDOW}),
    "qwen2_moe": Family(
        "qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "norm_topk_prob": False}
    ),
    "qwen3_moe": Family("qwen3_moe", {**_MOE, "norm_topk_prob": True, "decoder_sparse_step": 1}),
    "olmo2": Family("olmo2", {"head_dim": None}),
    "olmo3": Family(
        "olmo3",
        {"head_dim": None, "sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    # In groups, of which one is chosen; queries by two matrices.
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **LATENT,
            **_rope(
                "yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.1, original_max_position_embeddings=128, beta_fast=32
            ),
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe": Family(
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek_v2": Family(
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    # Linear biases by position, which kernels of attention do not know.
    "bloom": Family("bloom", {**_OLD, "head_dim": None}),
    "falcon": Family("falcon", {**_OLD, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_7b": Family("falcon", {**_OLD, "tie_word_embeddings": True, "bias": False}),
    "falcon_rw": Family("falcon", {**_OLD, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "mpt": Family("mpt", {**_OLD, "n_heads": 3, "attn_config": {"clip_qkv": 1.5}, "max_seq_len": 512}),
    "gpt_neo": Family(
        "gpt_neo",
        {
            **_OLD,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": _WINDOW,
        },
    ),
    "gpt2": Family(
        "gpt2",
        {
            **dict.fromkeys(BASE),
            "vocab_size": VOCAB_SIZE,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "bos_token_id": BOS_TOKEN_ID,
            "eos_token_id": EOS_TOKEN_ID,
        },
    ),
}

# Families that our decoder has no switches for: they run on transformers' networks.
FOREIGN_FAMILIES: dict[str, Family] = {
    "granite": Family("granite", {"head_dim": None, "embedding_multiplier": 2.0, "logits_scaling": 3.0}),
    "gpt_neox": Family("gpt_neox", {"head_dim": None, "num_key_value_heads": None, "rotary_pct": 0.5}),
    "starcoder2": Family("starcoder2", {"head_dim": None, "sliding_window": _WINDOW}),
    "cohere2": Family("cohere2", {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmoe": Family("olmoe", {"head_dim": None, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "sliding_window": _WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **_rope(
                "yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=128
            ),
        },
    ),
    "granite_swa": Family("granite_swa", {"head_dim": None, "sliding_window": _WINDOW, "num_hidden_layers": 4}),
    # Windows that only the mask tells.
    "phimoe": Family("phimoe", {"num_local_experts": 4, "sliding_window": _WINDOW, "head_dim": None}),
    # Layers that see chunks; the others' queries have a temperature by position, which their layers count themselves.
    "llama4": Family(
        "llama4_text",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 32,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # Layers that differ in KV heads, in their size and in having sinks, or take keys and values from others.
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {
            "v_head_dim": 12,
            "sliding_window": _WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "tie_word_embeddings": True,
            "sliding_window": _WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3n": Family(
        "gemma3n_text",
        {
            "tie_word_embeddings": True,
            "sliding_window": _WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "opt": Family("opt", {"head_dim": None, "num_key_value_heads": None, "ffn_dim": 96, "word_embed_proj_dim": None}),
}
FOREIGN_FAMILIES |= {name: Family(*described) for name, described in STATEFUL_FAMILIES.items()}


def write_checkpoint(
    directory: Path, family: str = "llama", *, seed: int = 0, values: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint with config, safetensors and tokenizer, as a user would have it. `values` go into its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    described = FAMILIES.get(family) or FOREIGN_FAMILIES.get(family) or Family(*RARE_FAMILIES[family])
    entries = {**BASE, **described.values, **(values or {})}
    config = AutoConfig.for_model(
        described.model_type, **{name: value for name, value in entries.items() if value is not None}
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, is_tied=bool(config.tie_word_embeddings))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def _draw(name: str, parameter: Any, *, is_tied: bool) -> None:
    """Matrices keep the size of what they multiply, or a little more; embeddings, norms and biases are wide."""
    if parameter.dim() >= 2:
        is_embedding = "embed" in name or "wte" in name or "wpe" in name
        wide = 0.15 if is_tied else 0.7  # a tied embedding is the head too
        parameter.normal_(0.0, wide if is_embedding else 1.4 * parameter.shape[-1] ** -0.5)
    else:
        noise = parameter.clone().normal_(0.0, 0.2)
        parameter.add_(noise)


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE over a few words: every byte is a token, so that any text and any split character occurs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the model of a server answers every request that it is given and then it waits for the next one to come"
    tokenizer.train_from_iterator(
        [words] * 4 + ["user assistant system hello world stop json true false null"] * 3, trainer
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(description))


@lru_cache(maxsize=4)
def reference_model(directory: Path) -> Any:
    """transformers' own model of a checkpoint, in float32, whose generate() does not stop at end-of-sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = EOS_TOKEN_ID
    return model


def reference_tokens(directory: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' generate() continues a prompt with, greedily, alone in its batch."""
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = reference_model(directory).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
    return [int(token) for token in output[0, len(prompt) :]]


def reference_logprobs(directory: Path, token_ids: Sequence[int]) -> Any:
    """The log-softmax [len, vocab] of transformers' logits after each token."""
    import torch

    with torch.inference_mode():
        logits = reference_model(directory)(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
