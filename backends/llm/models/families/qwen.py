"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from ..decoder_config import DecoderConfig, MoeConfig
from .family import Family
from .readers import Entries, base_config, layer_types, typed_windows, uniform_windows


class Qwen2(Family):
    model_type = "qwen2"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return base_config(entries, windows=_windows(entries))


class Qwen3(Family):
    model_type = "qwen3"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return base_config(entries, windows=_windows(entries), qk_norm="head")


class Qwen2Moe(Family):
    model_type = "qwen2_moe"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return _with_experts(entries, windows=_windows(entries))


class Qwen3Moe(Family):
    """All of its layers slide, or none does."""

    model_type = "qwen3_moe"

    def read_config(self, entries: Entries) -> DecoderConfig:
        is_sliding = entries.get("use_sliding_window")
        windows = uniform_windows(entries) if is_sliding else (None,) * int(entries["num_hidden_layers"])
        return _with_experts(entries, windows=windows, qk_norm="head")


def _windows(entries: Entries) -> tuple[int | None, ...]:
    """Sliding layers are those from `max_window_layers` on, and only if `use_sliding_window` says so."""
    num_layers = int(entries["num_hidden_layers"])
    window = entries.get("sliding_window") if entries.get("use_sliding_window") else None
    if not window:
        return (None,) * num_layers
    if entries.get("layer_types"):
        return typed_windows(entries, layer_types(entries))
    first = int(entries.get("max_window_layers") or 0)
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))


def _with_experts(entries: Entries, **switches: Any) -> DecoderConfig:
    """Layer i is sparse if (i + 1) is a multiple of `decoder_sparse_step` and it is not among `mlp_only_layers`."""
    moe = MoeConfig(
        num_experts=int(entries.get("num_experts") or entries["num_local_experts"]),
        num_experts_per_tok=int(entries["num_experts_per_tok"]),
        intermediate_size=int(entries["moe_intermediate_size"]),
        is_normalised=bool(entries.get("norm_topk_prob", False)),
        shared_intermediate_size=int(entries.get("shared_expert_intermediate_size") or 0),
    )
    step = int(entries.get("decoder_sparse_step") or 1)
    dense = set(entries.get("mlp_only_layers") or ())
    layers = frozenset(
        layer for layer in range(int(entries["num_hidden_layers"])) if (layer + 1) % step == 0 and layer not in dense
    )
    return base_config(entries, moe=moe, moe_layers=layers, **switches)
