"""Networks of random weights, in the shapes of what people run: written as checkpoints, or held in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def _llama(
    hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, **more: Any
) -> dict[str, Any]:
    """`heads`: of queries, of keys, and how wide each is."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
        **more,
    }


_QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny (2 M)": _llama(192, 512, 4, (6, 2, 32), 2048),  # that of model_repository/tiny_chat
    "100 M": _llama(768, 2048, 12, (12, 4, 64), 32000),
    "135 M": _llama(576, 1536, 30, (9, 3, 64), 49152, tie_word_embeddings=True),  # that of SmolLM2
    "Qwen3-0.6B": _llama(1024, 3072, 28, (16, 8, 128), 151936, tie_word_embeddings=True, **_QWEN),
    "Llama-3.2-1B": _llama(2048, 8192, 16, (32, 8, 64), 128256, tie_word_embeddings=True, dtype="bfloat16"),
    "Llama-3.1-8B": _llama(4096, 14336, 32, (32, 8, 128), 128256, dtype="bfloat16"),
}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-shaped checkpoint's tensors, without the prefix `model.`."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        inside = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            inside |= {"self_attn.q_norm": (width,), "self_attn.k_norm": (width,)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device) * (0.5 if "embed" in name else shape[-1] ** -0.5)


def write_checkpoint(directory: Path, config: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    dtype = getattr(torch, config["dtype"])
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": random_tensor(name, shape, dtype)
        for name, shape in tensor_shapes(config).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
