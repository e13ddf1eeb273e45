"""Tiny encoders as GGUF files, written by the `gguf` package in the manner of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from support.gguf_models import Array, QuantizationType

ENCODER_ARCHITECTURES = {
    "bert": "bert",
    "roberta": "bert",
    "xlm_roberta": "bert",
    "distilbert": "bert",
    "nomic": "nomic-bert",
    "jina": "jina-bert-v3",
    "modernbert": "modern-bert",
    "eurobert": "eurobert",
    "gemma3": "gemma-embedding",
}
_SPACE = "\u2581"


def write_encoder_gguf(
    directory: Path,
    path: Path,
    family: str,
    *,
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    kind: QuantizationType = QuantizationType.F32,
    dense: Mapping[str, Array] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """The encoder in `directory`, one of `ENCODER_ARCHITECTURES`; matrices become `kind`.

    `tokenizer`: metadata in place of those of the directory's word pieces.
    """
    name = ENCODER_ARCHITECTURES[family]
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, name)
    _add_config(writer, config, name)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    add_metadata(writer, word_pieces(directory) if tokenizer is None else tokenizer)
    tensors = _renamed(config, name, load_file(directory / "model.safetensors")) | dict(dense or {})
    for key, tensor in tensors.items():
        stored = kind if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 else QuantizationType.F32
        writer.add_tensor(key, gguf.quants.quantize(np.ascontiguousarray(tensor), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Names are without their prefix."""
    for name, value in metadata.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bytes):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def word_pieces(directory: Path) -> dict[str, Any]:
    """The directory's vocabulary, with what begins a word marked in place of what continues one."""
    document = json.loads((directory / "tokenizer.json").read_text())
    special = {token["content"] for token in document["added_tokens"]}
    vocabulary = document["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    stored = [
        token if token in special else token[2:] if token.startswith("##") else _SPACE + token for token in tokens
    ]
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    config = json.loads((directory / "config.json").read_text())
    unused = range(len(tokens), config["vocab_size"])
    return {
        "model": "bert",
        "pre": "default",
        "tokens": stored + [f"[PAD{token_id}]" for token_id in unused],
        "token_type": kinds + [gguf.TokenType.UNUSED for _ in unused],
        "token_type_count": config.get("type_vocab_size", 1),
        "cls_token_id": vocabulary["[CLS]"],
        "bos_token_id": vocabulary["[CLS]"],
        "eos_token_id": vocabulary["[SEP]"],
        "seperator_token_id": vocabulary["[SEP]"],
        "padding_token_id": vocabulary["[PAD]"],
        "unknown_token_id": vocabulary["[UNK]"],
    }


def _renamed(config: Mapping[str, Any], name: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers") or config["n_layers"])
    renamed: dict[str, Array] = {}
    for key, tensor in tensors.items():
        if key.startswith("pooler."):
            continue
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"{key} has no name in {name}"
        if name == "gemma-embedding" and key.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if stored == "position_embd.weight" and "roberta" in config["model_type"]:
            tensor = tensor[config["pad_token_id"] + 1 :]
        renamed[stored] = tensor
    return renamed


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], name: str) -> None:
    heads = config.get("num_attention_heads") or config["n_heads"]
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layers"])
    skipped = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    writer.add_context_length(config["max_position_embeddings"] - skipped)
    writer.add_embedding_length(config.get("hidden_size") or config["dim"])
    writer.add_feed_forward_length(config.get("intermediate_size") or config["hidden_dim"])
    writer.add_head_count(heads)
    writer.add_causal_attention(False)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_head_count_kv(config["num_key_value_heads"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config.get("norm_eps") or 1e-12)
    if name == "gemma-embedding":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_float32(f"{name}.attention.scale", config["query_pre_attn_scalar"] ** -0.5)
    if name == "modern-bert":
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(2)
    rope = config.get("rope_parameters") or {}
    if local := rope.get("sliding_attention"):
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope := rope.get("full_attention") or rope:
        writer.add_rope_freq_base(rope["rope_theta"])
