"""The architectures of GGUF files that our families run: their names of tensors, and what their metadata say.

Both become what a checkpoint of transformers has: modules inside the decoder, and the entries of a config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from modelserver.backend import UnsupportedError

from .gguf_architecture import LAYER, TOP, Architecture, Entries, Metadata, common_entries
from .gguf_encoders import DENSE, ENCODERS, bert_architecture

_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {
    **{name: inner.replace("shared_expert", "shared_experts") for name, inner in _EXPERTS.items()},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    # Of a layer for multi-token prediction, which comes behind the others.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **_SHARED_EXPERTS,
}
_BOTH_SIDES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# What the published sizes of Gemma scale attention by, which their files do not say: layers of those that differ.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _softmax_router(metadata: Metadata) -> None:
    """UnsupportedError for routers of another kind than our mixtures have."""
    metadata.refuse("expert_group_count")
    if metadata.optional_integer("expert_gating_func") not in (None, 0, 1):
        raise UnsupportedError(f"{metadata.file.path}: {metadata.name}.expert_gating_func is not softmax")
    if metadata.number("expert_weights_scale") not in (None, 0.0, 1.0):
        raise UnsupportedError(f"{metadata.file.path}: {metadata.name}.expert_weights_scale is not supported")


def _mixtral(metadata: Metadata) -> Entries:
    _softmax_router(metadata)
    return {
        **common_entries(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _deepseek(metadata: Metadata) -> Entries:
    """Files with `key_length_mla` say of one head that all share; those before say it of each head."""
    rope_dim = metadata.integer("rope.dimension_count")
    key = metadata.optional_integer("attention.key_length_mla") or metadata.integer("attention.key_length")
    value = metadata.optional_integer("attention.value_length_mla") or metadata.integer("attention.value_length")
    return {
        **common_entries(metadata, rope_dim),
        "q_lora_rank": metadata.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
        **_shared_experts(metadata),
        "topk_method": "group_limited_greedy",
    }


def _glm_experts(metadata: Metadata) -> Entries:
    """GLM-4.5 and later."""
    if metadata.optional_integer("expert_gating_func") not in (None, _SIGMOID):
        raise UnsupportedError(f"{metadata.file.path}: {metadata.name}.expert_gating_func is not sigmoid")
    has_norm = "blk.0.attn_q_norm.weight" in metadata.tensors
    return {**common_entries(metadata), **_shared_experts(metadata), "use_qk_norm": has_norm}


def _shared_experts(metadata: Metadata) -> Entries:
    """What DeepSeek's mixtures say. Layers for multi-token prediction are among the file's, and not the config's."""
    return {
        "num_hidden_layers": metadata.num_layers - (metadata.optional_integer("nextn_predict_layers") or 0),
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.optional_integer("expert_shared_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.optional_integer("leading_dense_block_count") or 0,
        "routed_scaling_factor": metadata.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(metadata.file.flag(f"{metadata.name}.expert_weights_norm")),
        "n_group": metadata.optional_integer("expert_group_count") or 1,
        "topk_group": metadata.optional_integer("expert_group_used_count") or 1,
    }


def _deepseek_architecture(metadata: Metadata) -> Architecture:
    """V2 and V3 by the function of the router's scores."""
    function = metadata.optional_integer("expert_gating_func") or _SOFTMAX
    if function not in _DEEPSEEKS:
        raise UnsupportedError(f"{metadata.file.path}: {metadata.name}.expert_gating_func {function} is not supported")
    return _DEEPSEEKS[function]


def _sized_by(metadata: Metadata, name: str, dimension: int) -> int | None:
    """The length of a dimension of the first layer's tensor of a name."""
    for index in range(metadata.num_layers):
        place = metadata.tensors.get(f"blk.{index}.{name}.weight")
        if place is not None and len(place.shape) > dimension:
            return place.shape[dimension]
    return None


def _qwen_experts(metadata: Metadata) -> Entries:
    _softmax_router(metadata)
    is_normalised = metadata.file.flag(f"{metadata.name}.expert_weights_norm")
    usual = metadata.name == "qwen3moe"
    entries = {
        **common_entries(metadata),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": _sized_by(metadata, "ffn_up_exps", 1)
        or metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": usual if is_normalised is None else is_normalised,
        "mlp_only_layers": [
            index for index in range(metadata.num_layers) if f"blk.{index}.ffn_gate_inp.weight" not in metadata.tensors
        ],
    }
    if shared := _sized_by(metadata, "ffn_up_shexp", 0):
        entries["shared_expert_intermediate_size"] = shared
    entries.pop("sliding_window", None)
    return entries


def _qwen(metadata: Metadata) -> Entries:
    """The window of its configs is not used."""
    entries = common_entries(metadata)
    entries.pop("sliding_window", None)
    return entries


def _gemma2(metadata: Metadata) -> Entries:
    return {
        **common_entries(metadata),
        **_sliding(metadata, usual_pattern=2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": metadata.number("final_logit_softcapping") or 30.0,
    }


def _gemma3(metadata: Metadata) -> Entries:
    return {
        **common_entries(metadata),
        **_sliding(metadata, usual_pattern=6),
        "rope_theta": metadata.number("rope.freq_base") or 1e6,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa") or 1e4,
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
    }


def _gemma_embedding(metadata: Metadata) -> Entries:
    return {**_gemma3(metadata), "use_bidirectional_attention": True}


def _sliding(metadata: Metadata, usual_pattern: int) -> Entries:
    scale = metadata.number("attention.scale")
    queries: float = metadata.head_dim
    if scale:
        queries = _near_integer(scale**-2)
    elif metadata.num_layers == _GEMMA_27B_LAYERS.get(metadata.name):
        queries = metadata.integer("embedding_length") / metadata.integer("attention.head_count")
    return {
        "query_pre_attn_scalar": queries,
        "sliding_window": metadata.optional_integer("attention.sliding_window") or 4096,
        "layer_types": metadata.layer_types(usual_pattern),
    }


def _near_integer(value: float) -> float:
    """The integer that a value in float32 was made of."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-5) else value


def _olmo3(metadata: Metadata) -> Entries:
    return {**common_entries(metadata), "layer_types": metadata.layer_types(4)}


def _gpt2(metadata: Metadata) -> Entries:
    embedding = metadata.matrix("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0],
        "n_embd": metadata.integer("embedding_length"),
        "n_layer": metadata.num_layers,
        "n_head": metadata.integer("attention.head_count"),
        "n_positions": metadata.integer("context_length"),
        "n_inner": metadata.integer("feed_forward_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon") or 1e-5,
        "tie_word_embeddings": True,
        "dtype": metadata.dtype(),
    }


def _older(metadata: Metadata) -> Entries:
    """What Bloom, Falcon and MPT share. Files have queries, keys and values behind each other."""
    return {
        "vocab_size": metadata.matrix("token_embd.weight").shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": metadata.integer("attention.head_count"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon") or 1e-5,
        "has_grouped_qkv": False,
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "dtype": metadata.dtype(),
    }


def _bloom(metadata: Metadata) -> Entries:
    return {**_older(metadata), "seq_length": metadata.integer("context_length")}


def _falcon(metadata: Metadata) -> Entries:
    """Those with rotations, whose layers are parallel: files of Falcon-RW say nothing of their biases."""
    if "blk.0.ffn_norm.weight" in metadata.tensors:
        raise UnsupportedError(
            f"{metadata.file.path} holds a falcon whose layers are not parallel, as in Falcon-RW: serve its checkpoint "
            "in safetensors"
        )
    return {
        **_older(metadata),
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in metadata.tensors else 1,
        "num_kv_heads": metadata.optional_integer("attention.head_count_kv") or 1,
        "ffn_hidden_size": metadata.integer("feed_forward_length"),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base") or 10000.0,
    }


def _mpt(metadata: Metadata) -> Entries:
    entries = _older(metadata)
    heads = entries["num_attention_heads"]
    if metadata.optional_integer("attention.head_count_kv") not in (None, 0, heads):
        raise UnsupportedError(f"{metadata.file.path}: mpt.attention.head_count_kv is not supported")
    if "blk.0.attn_q_norm.weight" in metadata.tensors or "position_embd.weight" in metadata.tensors:
        raise UnsupportedError(f"{metadata.file.path}: norms of queries and learned positions of mpt are not supported")
    steepest = metadata.number("attention.max_alibi_bias")
    clip = metadata.number("attention.clamp_kqv")
    return {
        **entries,
        "d_model": entries["hidden_size"],
        "n_layers": entries["num_hidden_layers"],
        "n_heads": heads,
        "expansion_ratio": metadata.integer("feed_forward_length") // max(1, entries["hidden_size"]),
        "max_seq_len": metadata.integer("context_length"),
        "attn_config": {"alibi": bool(steepest), "alibi_bias_max": steepest or 8, "clip_qkv": clip or None},
    }


def _falcon_architecture(metadata: Metadata) -> Architecture:
    """With two norms, that of the feed-forward has the name of the only one."""
    found = _ARCHITECTURES["falcon"]
    if "blk.0.attn_norm_2.weight" not in metadata.tensors:
        return found
    return replace(found, layer={**found.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})


_OLDER_TOP = {"token_embd": "word_embeddings", "output_norm": "ln_f", "output": "lm_head"}
_OLDER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def _gemma(model_type: str, entries: Callable[[Metadata], Entries], layer: Mapping[str, str]) -> Architecture:
    return Architecture(model_type=model_type, entries=entries, layer=layer, norm_offset=1.0)


def find_architecture(metadata: Metadata) -> Architecture:
    """UnsupportedError for one that no family of ours runs."""
    file = metadata.file
    kind = file.text("general.type")
    if kind not in (None, "model"):
        raise UnsupportedError(f"{file.path} holds a GGUF {kind!r}, not a model")
    name = metadata.name
    if name in ("llama", "mistral3"):
        metadata.refuse("attention.temperature_scale", "attention.temperature_length")
        return _llama(metadata)
    if name == "bert":
        return bert_architecture(metadata)
    if name == "deepseek2":
        return _deepseek_architecture(metadata)
    if name == "falcon":
        return _falcon_architecture(metadata)
    if name == "olmo2" and metadata.optional_integer("attention.sliding_window"):
        return _OLMO3
    found = _ARCHITECTURES.get(name)
    if found is None:
        known = ", ".join(sorted({"deepseek2", "llama", "mistral3", *_ARCHITECTURES}))
        raise UnsupportedError(
            f"{file.path} holds a model of the architecture {name!r}, which is not read from GGUF: {known} are. "
            "Serve its checkpoint in safetensors"
        )
    return found


def written_architecture(model_type: str) -> tuple[str, Architecture]:
    """The name and the architecture of files that are written of a checkpoint. UnsupportedError names what is known."""
    known = {kind: ("llama", found) for kind, found in _LLAMAS.items()} | {"olmo3": ("olmo2", _OLMO3)}
    known |= {found.model_type: ("deepseek2", found) for found in _DEEPSEEKS.values()}
    known |= {found.model_type: (name, found) for name, found in _ARCHITECTURES.items() if name not in _NOT_WRITTEN}
    if model_type not in known:
        raise UnsupportedError(f"GGUF files of {model_type} are not written; of {', '.join(sorted(known))} they are")
    return known[model_type]


def _llama(metadata: Metadata) -> Architecture:
    if metadata.optional_integer("expert_count"):
        return _LLAMAS["mixtral"]
    return _LLAMAS["mistral" if metadata.optional_integer("attention.sliding_window") else "llama"]


# What llama.cpp calls by one name.
_LLAMAS = {
    "llama": Architecture(model_type="llama", entries=common_entries, interleaves_heads=True),
    "mistral": Architecture(model_type="mistral", entries=common_entries, interleaves_heads=True),
    "mixtral": Architecture(model_type="mixtral", entries=_mixtral, layer=LAYER | _MIXTRAL, interleaves_heads=True),
}
_SOFTMAX, _SIGMOID = 1, 2
_DEEPSEEKS = {
    function: Architecture(model_type=model_type, entries=_deepseek, layer=LAYER | _LATENT)
    for function, model_type in ((_SOFTMAX, "deepseek_v2"), (_SIGMOID, "deepseek_v3"))
}
_OLMO3 = Architecture(model_type="olmo3", entries=_olmo3, layer=LAYER | _BOTH_SIDES)
_NOT_WRITTEN = frozenset({*ENCODERS, "gemma-embedding", "bloom", "falcon", "mpt"})

_ARCHITECTURES: dict[str, Architecture] = {
    **ENCODERS,
    "qwen2": Architecture(model_type="qwen2", entries=_qwen),
    "qwen3": Architecture(model_type="qwen3", entries=_qwen),
    "qwen2moe": Architecture(model_type="qwen2_moe", entries=_qwen_experts, layer=LAYER | _EXPERTS),
    "qwen3moe": Architecture(model_type="qwen3_moe", entries=_qwen_experts, layer=LAYER | _EXPERTS),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        entries=_glm_experts,
        layer={name: inner for name, inner in LAYER.items() if name != "ffn_norm"}
        | _SHARED_EXPERTS
        | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "gemma": _gemma("gemma", common_entries, LAYER),
    "gemma2": _gemma("gemma2", _gemma2, LAYER | _BOTH_SIDES),
    "gemma3": _gemma("gemma3_text", _gemma3, LAYER | _BOTH_SIDES),
    "gemma-embedding": replace(_gemma("gemma3_text", _gemma_embedding, LAYER | _BOTH_SIDES), top=TOP | DENSE),
    "phi3": Architecture(model_type="phi3", entries=common_entries, layer=LAYER | {"ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Architecture(model_type="olmo2", entries=common_entries, layer=LAYER | _BOTH_SIDES),
    "bloom": Architecture(
        model_type="bloom",
        entries=_bloom,
        top=_OLDER_TOP | {"token_embd_norm": "word_embeddings_layernorm"},
        layer=_OLDER_LAYER,
        layer_name="h.{}",
    ),
    "falcon": Architecture(model_type="falcon", entries=_falcon, top=_OLDER_TOP, layer=_OLDER_LAYER, layer_name="h.{}"),
    "mpt": Architecture(
        model_type="mpt",
        entries=_mpt,
        top={"token_embd": "wte", "output_norm": "norm_f", "output": "lm_head"},
        layer={
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        layer_name="blocks.{}",
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        entries=_gpt2,
        top={"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layer_name="h.{}",
        is_transposed=True,
    ),
}
