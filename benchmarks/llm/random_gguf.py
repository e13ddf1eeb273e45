"""GGUF files of random weights, in the shapes of what people run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.llm.shapes import random_tensor, tensor_shapes

# Pairs of bytes that get a token of their own.
_MOST_PAIRS = 20_000


def write_gguf(path: Path, config: Mapping[str, Any]) -> Path:
    """A Llama or Qwen3 with matrices in float32. The values of a seed are the same on every machine."""
    name = config["model_type"]
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, config["vocab_size"])
    for key, tensor in _tensors(config):
        writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    torch.manual_seed(0)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == config["model_type"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for key, shape in tensor_shapes(config).items():
        stored = names.get_name(key if key.startswith("lm_head") else f"model.{key}", try_suffixes=(".weight",))
        assert stored is not None, f"{key} has no name in a GGUF file"
        yield stored, random_tensor(key, shape, torch.float32).numpy()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Bytes, pairs of bytes, and tokens that no text has."""
    alphabet = sorted(ByteLevel.alphabet())
    num_pairs = min(_MOST_PAIRS, vocab_size - len(alphabet))
    pairs = [pair for pair, _ in zip(product(alphabet, repeat=2), range(num_pairs), strict=False)]
    tokens = [*alphabet, *("".join(pair) for pair in pairs)]
    unused = [f"<unused{index}>" for index in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + unused)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * len(unused))
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
