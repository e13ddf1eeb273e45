"""Tiny checkpoints as GGUF files, written by the `gguf` package in the manner of llama.cpp's converter."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

QuantizationType = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gpt2": "gpt2",
    "bloom": "bloom",
    "falcon": "falcon",
    "mpt": "mpt",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
}


def projector_bytes() -> bytes:
    """A GGUF file that says that it is what sees pictures beside a language model, and has nothing else."""
    key, value = b"general.architecture", b"clip"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry


def write_gguf(
    directory: Path,
    path: Path,
    *,
    type_of: Callable[[str, Array], QuantizationType] = lambda _name, _tensor: QuantizationType.F32,
    split: int = 1,
) -> Path:
    """The checkpoint in `directory` as a file. `type_of` chooses for a tensor's name in the file and its values.

    With `split`, several files, of which the first is returned.
    """
    config = json.loads((directory / "config.json").read_text())
    name = _ARCHITECTURES[config["model_type"]]
    tensors = _renamed(config, name, load_file(directory / "model.safetensors"))
    if split == 1:
        writers = [gguf.GGUFWriter(path, name)]
        paths = [path]
    else:
        paths = [path.with_name(f"{path.stem}-{n:05}-of-{split:05}.gguf") for n in range(1, split + 1)]
        writers = [gguf.GGUFWriter(each, name) for each in paths]
        for number, writer in enumerate(writers):
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", split)
            writer.add_int32("split.tensors.count", len(tensors))
    (_add_older if name in ("bloom", "falcon", "mpt") else _add_config)(writers[0], config, name)
    add_tokenizer(writers[0], directory)
    for index, (key, tensor) in enumerate(tensors.items()):
        kind = type_of(key, tensor) if tensor.ndim > 1 else QuantizationType.F32
        writer = writers[index % split]
        writer.add_tensor(key, gguf.quants.quantize(np.ascontiguousarray(tensor, np.float32), kind), raw_dtype=kind)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def _renamed(config: Mapping[str, Any], name: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors by their names in the file, and as it has them."""
    num_layers = (config.get("num_hidden_layers") or config.get("n_layers") or config["n_layer"]) + config.get(
        "num_nextn_predict_layers", 0
    )
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, num_layers)
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, num_layers)  # of layers without experts
    renamed: dict[str, Array] = {}
    if config["model_type"] == "deepseek_v3":  # as files are written today; those of V2 are as they once were
        tensors = _with_matrices_by_head(config, tensors)
    for key, tensor in _with_stacked_experts(tensors).items():
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")
        suffixes = (".weight", ".bias")
        key = key.removeprefix("transformer.") if name == "bloom" else key
        stored = names.get_name(key, try_suffixes=suffixes) or dense.get_name(key, try_suffixes=suffixes)
        assert stored is not None, f"{key} has no name in {name}"
        renamed[stored] = converted(config, name, key, tensor)
    if name == "llama" and (factors := _llama3_factors(config)) is not None:
        renamed["rope_freqs.weight"] = factors
    rope = config.get("rope_parameters") or {}
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            renamed[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return renamed


def _with_matrices_by_head(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Keys [heads, rank, inputs] and values [heads, outputs, rank] in place of the matrix that makes both."""
    found: dict[str, Array] = {}
    for key, tensor in tensors.items():
        if "kv_b_proj" not in key:
            found[key] = tensor
            continue
        both = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        keys, values = np.split(both, [config["qk_nope_head_dim"]], axis=1)
        found[key.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
        found[key.replace("kv_b_proj", "v_b_proj")] = values
    return found


def _with_stacked_experts(tensors: Mapping[str, Array]) -> dict[str, Array]:
    stacked: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    for key in sorted(tensors, key=lambda key: [int(part) if part.isdigit() else 0 for part in key.split(".")]):
        before, separator, after = key.partition(".experts.")
        if separator and after[0].isdigit():
            experts.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(tensors[key])
        else:
            stacked[key] = tensors[key]
    return stacked | {key: np.stack(each) for key, each in experts.items()}


def converted(config: Mapping[str, Any], name: str, key: str, tensor: Array) -> Array:
    """A tensor as a file has it: queries and keys of Llamas in the order in which llama.cpp turns them."""
    if name == "llama" and ("q_proj" in key or "k_proj" in key):
        heads = config["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if name.startswith("gemma") and key.endswith("norm.weight"):
        return tensor + np.float32(1)
    if name in ("bloom", "falcon") and "query_key_value" in key:
        heads = config.get("num_attention_heads") or config["n_head"]
        kept = heads if name == "bloom" else _falcon_kv_heads(config)
        groups = tensor.reshape(kept, heads // kept + 2, -1, *tensor.shape[1:])
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    if name == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    return tensor


def _falcon_kv_heads(config: Mapping[str, Any]) -> int:
    return int(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)


def _add_older(writer: gguf.GGUFWriter, config: Mapping[str, Any], name: str) -> None:
    """Of Bloom, Falcon and MPT."""
    hidden = config.get("d_model") or config["hidden_size"]
    heads = config.get("n_heads") or config.get("n_head") or config["num_attention_heads"]
    writer.add_block_count(config.get("n_layers") or config.get("n_layer") or config["num_hidden_layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(4 * hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    if name == "mpt":
        writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
        writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])
    else:
        writer.add_head_count_kv(heads if name == "bloom" else _falcon_kv_heads(config))


def _llama3_factors(config: Mapping[str, Any]) -> Array | None:
    """What each frequency is divided by."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config["head_dim"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    original = rope["original_max_position_embeddings"]
    lengths = 2 * np.pi / frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / lengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths < original / high, 1.0, np.where(lengths > original / low, rope["factor"], blended))
    return factors.astype(np.float32)


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], name: str) -> None:
    if name == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if name == "deepseek2":
        _add_latent(writer, config)
        head_dim = config["qk_rope_head_dim"]
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    num_predicting = config.get("num_nextn_predict_layers", 0)
    writer.add_block_count(config["num_hidden_layers"] + num_predicting)
    if num_predicting:
        writer.add_nextn_predict_layers(num_predicting)
    if name == "glm4moe":
        _add_shared_experts(writer, config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_rope(writer, config, head_dim)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if "layer_types" in config and name in ("gemma3", "olmo2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config["model_type"] in ("gemma2", "gemma3_text"):
        writer.add_float32(f"{name}.attention.scale", config["query_pre_attn_scalar"] ** -0.5)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if experts := config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)


def _add_latent(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """What the converter says of DeepSeek V3 today, and what it said of V2."""
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if config["model_type"] == "deepseek_v3":
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config["v_head_dim"])
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(key)
        writer.add_value_length(config["v_head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    _add_shared_experts(writer, config)


def _add_shared_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    rope = config["rope_parameters"]
    local = rope.get("sliding_attention") or {}
    rope = rope.get("full_attention") or rope
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if local and local["rope_theta"] != rope["rope_theta"]:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if multiplier := rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, *, pre: str = "gpt-2") -> None:
    """The byte-level tokenizer of `directory`, and its chat template."""
    document = json.loads((directory / "tokenizer.json").read_text())
    described = json.loads((directory / "tokenizer_config.json").read_text())
    vocabulary = document["model"]["vocab"]
    added = {token["content"]: token for token in document["added_tokens"]}
    ids = vocabulary | {content: token["id"] for content, token in added.items()}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [
        gguf.TokenType.NORMAL
        if token not in added
        else (gguf.TokenType.CONTROL if added[token]["special"] else gguf.TokenType.USER_DEFINED)
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_bos_token_id(ids[described["bos_token"]])
    writer.add_eos_token_id(ids[described["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(described["chat_template"])
