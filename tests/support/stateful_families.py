"""Tiny networks with layers that do not attend, but keep a state of each sequence: model_type, and what changes in the
common config (`tiny_checkpoints`).
"""

from __future__ import annotations

from typing import Any

_WINDOW = 11
_MAMBA_2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
# transformers bounds these steps in prompts and not in what is generated, so that the two would differ.
_UNBOUNDED = {"time_step_min": 1e-9}
_MAMBA_1 = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_THREE = {"num_hidden_layers": 3}
_LINEAR = {**_THREE, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **_LINEAR,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_CONVOLUTIONS = {**_THREE, "head_dim": None, "layer_types": ["conv", "full_attention", "conv"]}
_EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_LATENT = {
    **_LINEAR,
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts_per_token": 2,
    "first_k_dense_replace": 1,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}
_WITHOUT_ATTENTION = {"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None}
_SHARED_ATTENTION = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
}

STATEFUL_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": ("bailing_hybrid", {**_LATENT, "q_lora_rank": 32, "num_experts": 16}),
    "bamba": ("bamba", {**_THREE, **_MAMBA_2, "head_dim": None, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**_MAMBA_2, "head_dim": None, "mamba_d_ssm": 96}),
    "falcon_mamba": (
        "falcon_mamba",
        {**_WITHOUT_ATTENTION, "state_size": 8, "time_step_rank": 4, "intermediate_size": 96},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_THREE,
            **_MAMBA_2,
            "head_dim": None,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 40,
            "num_local_experts": 4,
        },
    ),
    "jamba": (
        "jamba",
        {
            **_MAMBA_1,
            "head_dim": None,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
        },
    ),
    "kimi_linear": ("kimi_linear", {**_LATENT, "num_experts": 8}),
    "lfm2": ("lfm2", {**_CONVOLUTIONS, "block_multiple_of": 16}),
    "lfm2_moe": ("lfm2_moe", {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1}),
    "lfm3": (
        "lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": _WINDOW,
        },
    ),
    "mamba": ("mamba", {**_WITHOUT_ATTENTION, "state_size": 8, "time_step_rank": 4, "intermediate_size": 96}),
    "mamba2": (
        "mamba2",
        {**_WITHOUT_ATTENTION, "num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            **_UNBOUNDED,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "n_routed_experts": 4,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_DELTA, "head_dim": None, "linear_num_value_heads": 2}),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS}),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_EXPERTS}),
    "zamba": ("zamba", {**_SHARED_ATTENTION, **_MAMBA_1, "attention_hidden_size": 96, "attention_head_dim": 24}),
    "zamba2": (
        "zamba2",
        {
            **_SHARED_ATTENTION,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 6,
            "chunk_size": 8,
            **_UNBOUNDED,
            "num_mem_blocks": 2,
            "adapter_rank": 4,
        },
    ),
    "zaya": ("zaya", {"moe_intermediate_size": 24, "num_experts": 4, "router_hidden_size": 16}),
}
