"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ...step_context import StepContext
from ..build import DecoderBuilder
from ..decoder import DecoderLayer
from ..decoder_config import DecoderConfig, MoeConfig
from ..draft_head import PredictionNames
from .family import Family
from .readers import Entries, base_config, layer_types, typed_windows, uniform_windows


class Qwen2(Family):
    model_type = "qwen2"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return base_config(entries, windows=_windows(entries))


class Mimo(Qwen2):
    """Xiaomi's, with a layer for multi-token prediction."""

    model_type = "mimo"
    prediction = PredictionNames(
        layer="mtp_layers.0",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        join="input_proj",
        norm="final_layernorm",
        is_hidden_first=True,
        reads_normalised=False,
    )


class Qwen25Vl(Qwen2):
    """Also of Qwen2-VL. Rotations are in sections, by positions of pictures; of text they are the usual ones."""

    model_type = "qwen2_5_vl_text"
    usual_sections: ClassVar = {"mrope_section": [16, 24, 24]}

    def read_config(self, entries: Entries) -> DecoderConfig:
        return super().read_config(_in_sections(entries, self.usual_sections))


class Qwen2Vl(Qwen25Vl):
    model_type = "qwen2_vl_text"


class Qwen3(Family):
    model_type = "qwen3"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return base_config(entries, windows=_windows(entries), qk_norm="head")


class Qwen3Vl(Qwen3):
    """Features of pictures are also added to what the first layers give."""

    model_type = "qwen3_vl_text"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return super().read_config(_in_sections(entries, {"mrope_section": [24, 20, 20], "mrope_interleaved": True}))

    def layer(self, build: DecoderBuilder, index: int) -> DecoderLayer:
        layer = super().layer(build, index)
        seen = build.weights.checkpoint.config.get("vision_config") or {}
        return _SeeingLayer(layer, index) if index < len(seen.get("deepstack_visual_indexes") or ()) else layer


class _SeeingLayer:
    """Adds the pictures' features for this layer to its rows."""

    def __init__(self, layer: DecoderLayer, index: int) -> None:
        self._layer = layer
        self._index = index

    def __call__(self, hidden: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        hidden = self._layer(hidden, step)
        return hidden if step.pictures is None else step.pictures.add_deep(hidden, self._index)


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


def _in_sections(entries: Entries, usual: Entries) -> Entries:
    name = "rope_parameters" if entries.get("rope_parameters") else "rope_scaling"
    return {**entries, name: {**usual, **(entries.get(name) or {})}}


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
