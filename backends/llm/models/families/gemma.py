"""Gemma 1 to 3: norms are stored less one, embeddings are scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..decoder_config import DecoderConfig, Names
from .family import Family
from .readers import Entries, base_config, layer_types, typed_windows, with_ropes_by_type


class Gemma(Family):
    model_type = "gemma"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return _gemma(entries)


class Gemma2(Family):
    """Every other layer slides."""

    model_type = "gemma2"
    names = Names(mlp_pre_norm="pre_feedforward_layernorm")
    usual_pattern = 2

    def read_config(self, entries: Entries) -> DecoderConfig:
        types = layer_types(entries, self.usual_pattern)
        return _gemma(
            entries,
            has_post_norm=True,
            windows=typed_windows(entries, types),
            layer_types=types,
            attention_scale=float(entries["query_pre_attn_scalar"]) ** -0.5,
            attention_softcap=entries.get("attn_logit_softcapping"),
            logit_softcap=entries.get("final_logit_softcapping"),
        )


class Gemma3(Gemma2):
    """Local layers turn with a base of their own; the scaling of older configs is for the global ones alone."""

    model_type = "gemma3_text"
    usual_pattern = 6

    def read_config(self, entries: Entries) -> DecoderConfig:
        local_theta = float(entries.get("rope_local_base_freq") or 1e4)
        config = super().read_config(with_ropes_by_type(entries, theta=1e6, local_theta=local_theta))
        return replace(config, qk_norm="head")


def _gemma(entries: Entries, **switches: Any) -> DecoderConfig:
    """`hidden_act` of Gemma's first checkpoints says "gelu" and means its tanh approximation."""
    activation = entries.get("hidden_activation") or "gelu_pytorch_tanh"
    scale = float(entries["hidden_size"]) ** 0.5
    return base_config(entries, norm_kind="rms_plus_one", activation=activation, embedding_scale=scale, **switches)
