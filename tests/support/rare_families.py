"""Further networks of transformers' own that run on our blocks: model_type, and what changes in the common config
(`tiny_checkpoints`).
"""

from __future__ import annotations

from typing import Any

_WINDOW = 11
_SLIDING = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_HEADS = {"head_dim": None}
_MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_ROUTED = {**_MOE, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

RARE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, values)
    for name, values in {
        "afmoe": {**_SLIDING, **_MOE, "num_experts": 4, "num_dense_layers": 1},
        "apertus": _HEADS,
        "arcee": {},
        "axk1": {**LATENT, **_ROUTED},
        "bitnet": _HEADS,
        "cohere": _HEADS,
        "cohere2_moe": {**_SLIDING, **_MOE, "num_experts": 4},
        "cwm": _SLIDING,
        "dots1": {**_SLIDING, **_ROUTED, "n_shared_experts": 1},
        "ernie4_5": {},
        "ernie4_5_moe": {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "head_dim": None},
        "exaone4": {**_SLIDING, **_HEADS},
        "exaone_moe": {**_SLIDING, **_MOE, "num_experts": 4, "head_dim": None},
        "flex_olmo": {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2},
        "flint": {**_SLIDING, **_MOE, "num_experts": 4},
        "glm": {"num_key_value_heads": 2},
        "glm4": {},
        "glm4_moe_lite": {**LATENT, **_ROUTED},
        "gpt_bigcode": {**_HEADS, "num_key_value_heads": None, "n_inner": 80},
        "granitemoe": {**_HEADS, **_LOCAL},
        "granitemoe_swa": {**_HEADS, **_LOCAL, "sliding_window": _WINDOW, "num_hidden_layers": 4},
        "granitemoeshared": {**_HEADS, **_LOCAL, "shared_intermediate_size": 24},
        "helium": {"head_dim": 12},
        "hunyuan_v1_dense": {},
        "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
        "hy_v3": {**_MOE, "num_experts": 4},
        "hyperclovax": {},
        "jais2": {},
        "laguna": {**_SLIDING, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 24},
        "longcat_flash": {
            **LATENT,
            "head_dim": 8,
            "ffn_hidden_size": 80,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 8,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
        "mellum": {**_SLIDING, **_MOE, "num_experts": 4},
        "minicpm3": LATENT,
        "minimax_m2": _LOCAL,
        "ministral": _SLIDING,
        "ministral3": {},
        "modernbert-decoder": {
            **_HEADS,
            "num_key_value_heads": None,
            "local_attention": 2 * _WINDOW,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 0,
            "sep_token_id": 1,
        },
        "nanochat": {},
        "nemotron": {},
        "olmo": _HEADS,
        "persimmon": {**_HEADS, "num_key_value_heads": None},
        "phi": {**_HEADS, "partial_rotary_factor": 0.5},
        "seed_oss": {},
        "smollm3": _HEADS,
        "solar_open": {**_ROUTED, "first_k_dense_replace": None},
        "stablelm": {**_HEADS, "partial_rotary_factor": 0.5},
        "vaultgemma": {**_SLIDING, "query_pre_attn_scalar": 24},
        "youtu": LATENT,
    }.items()
}
