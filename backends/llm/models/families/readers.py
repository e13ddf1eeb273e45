"""What many families read alike from the entries of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..decoder_config import DecoderConfig
from ..rope import Rope, read_rope

Entries = Mapping[str, Any]


def base_config(entries: Entries, **switches: Any) -> DecoderConfig:
    """What Llama-shaped configs share; `switches` are fields of `DecoderConfig` that replace it.

    Missing entries raise KeyError and wrong ones TypeError or ValueError; `Family.config_of` says so in words.
    """
    num_layers, num_heads = int(entries["num_hidden_layers"]), int(entries["num_attention_heads"])
    head_dim = int(entries.get("head_dim") or entries["hidden_size"] // num_heads)
    values: dict[str, Any] = {
        "model_type": entries["model_type"],
        "vocab_size": int(entries["vocab_size"]),
        "hidden_size": int(entries["hidden_size"]),
        "intermediate_size": int(entries["intermediate_size"]),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": int(entries.get("num_key_value_heads") or num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": int(entries.get("max_position_embeddings") or 2048),
        "windows": (None,) * num_layers,
        "ropes": _ropes(entries, head_dim, num_layers, switches.pop("layer_types", None)),
        "norm_eps": float(entries.get("rms_norm_eps") or 1e-6),
        "activation": entries.get("hidden_act") or entries.get("hidden_activation") or "silu",
        "attention_scale": head_dim**-0.5,
        "is_tied": bool(entries.get("tie_word_embeddings", False)),
        "dtype": stored_dtype(entries),
    }
    return DecoderConfig(**{**values, **switches})


def older_config(entries: Entries, renamed: Entries, **switches: Any) -> DecoderConfig:
    """What decoders from before Llama share: no rotations, layer norms with a mean, a feed-forward without a gate.

    `renamed` are the entries by the names that `base_config` reads.
    """
    usual = {
        "ropes": (None,) * int(renamed["num_hidden_layers"]),
        "norm_kind": "layer",
        "norm_eps": float(entries.get("layer_norm_epsilon", 1e-5)),
        "is_gated": False,
    }
    return base_config({**entries, **renamed}, **{**usual, **switches})


def stored_dtype(entries: Entries) -> str:
    """`dtype` since transformers 5, `torch_dtype` before."""
    return str(entries.get("dtype") or entries.get("torch_dtype") or "float32")


def _ropes(entries: Entries, head_dim: int, num_layers: int, types: list[str] | None) -> tuple[Rope, ...]:
    parameters = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    if "full_attention" in parameters:  # a set for each type of layer
        by_type = {
            name: read_rope(values, head_dim=head_dim, config=entries) for name, values in parameters.items() if values
        }
        return tuple(by_type[name] for name in types or layer_types(entries))
    return (read_rope(parameters, head_dim=head_dim, config=entries),) * num_layers


def layer_types(entries: Entries, usual_pattern: int | None = None) -> list[str]:
    """Explicit since transformers 4.5x. Older configs give a period: one layer in each period attends to everything."""
    num_layers = int(entries["num_hidden_layers"])
    given = entries.get("layer_types")
    if given:
        return list(given)
    pattern = entries.get("sliding_window_pattern") or entries.get("_sliding_window_pattern") or usual_pattern
    if pattern:
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]
    return ["full_attention"] * num_layers


def uniform_windows(entries: Entries) -> tuple[int | None, ...]:
    return (entries.get("sliding_window") or None,) * int(entries["num_hidden_layers"])


def typed_windows(entries: Entries, types: list[str]) -> tuple[int | None, ...]:
    return tuple(int(entries["sliding_window"]) if name == "sliding_attention" else None for name in types)


def with_ropes_by_type(entries: Entries, *, theta: float, local_theta: float) -> Entries:
    """`rope_parameters` by the type of a layer, which configs did not have before transformers 5."""
    if entries.get("rope_parameters"):
        return entries
    full = {"rope_theta": entries.get("rope_theta") or theta, **(entries.get("rope_scaling") or {})}
    by_type = {"full_attention": full, "sliding_attention": {"rope_theta": local_theta}}
    return {**entries, "rope_parameters": by_type}
