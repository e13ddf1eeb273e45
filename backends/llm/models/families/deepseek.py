"""DeepSeek V2 and V3, and the decoders that share their latent attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...attention.kv_blocks import KvGroup, KvLayout
from ..build import DecoderBuilder
from ..decoder import Block
from ..decoder_config import DecoderConfig, LatentConfig, MoeConfig, Names
from ..draft_head import PredictionNames
from ..rope import Rope
from .family import Family
from .readers import Entries, base_config


class _Latent(Family):
    """What a token keeps is one head: the key that is rotated, and the latent behind it, which is its value too."""

    names = Names(shared_expert="mlp.shared_experts", router_correction="mlp.gate.e_score_correction_bias")

    def read_config(self, entries: Entries) -> DecoderConfig:
        return _latent_config(entries)

    def attention(self, build: DecoderBuilder, index: int) -> Block:
        return build.latent_attention(index)

    def kv_layout(self, config: DecoderConfig, dtype: torch.dtype, *, num_ranks: int) -> KvLayout:  # noqa: ARG002
        assert config.latent is not None, "read_config makes it"
        group = KvGroup(
            layers=tuple(range(config.num_layers)),
            num_heads=1,
            key_width=config.head_dim,
            value_width=0,
            shared_width=config.latent.rank,
            dtype=dtype,
        )
        return KvLayout((group,))


class DeepseekV2(_Latent):
    """Experts by softmax; with `group_limited_greedy` those of the groups that have the best expert."""

    model_type = "deepseek_v2"

    def read_config(self, entries: Entries) -> DecoderConfig:
        is_grouped = entries.get("topk_method") == "group_limited_greedy"
        moe = _experts(entries, is_normalised=bool(entries.get("norm_topk_prob")), is_grouped=is_grouped)
        return _latent_config(entries, moe=moe, moe_layers=_sparse_layers(entries, usual_dense=0))


class DeepseekV3(_Latent):
    """Experts by sigmoid; of the groups whose two best experts are best together."""

    model_type = "deepseek_v3"
    prediction = PredictionNames()

    def read_config(self, entries: Entries) -> DecoderConfig:
        moe = _experts(entries, is_normalised=bool(entries.get("norm_topk_prob", True)), is_grouped=True)
        moe = replace(moe, scores="sigmoid", group_votes=2)
        return _latent_config(entries, moe=moe, moe_layers=_sparse_layers(entries, usual_dense=3))


class KimiK2(DeepseekV3):
    model_type = "kimi_k2"


class Glm4MoeLite(DeepseekV3):
    """Its config names the layers without experts."""

    model_type = "glm4_moe_lite"

    def read_config(self, entries: Entries) -> DecoderConfig:
        types = entries.get("mlp_layer_types")
        if types is None:
            return super().read_config({"first_k_dense_replace": 1, **entries})
        config = super().read_config(entries)
        return replace(config, moe_layers=frozenset(layer for layer, kind in enumerate(types) if kind == "sparse"))


class Glm4Moe(Family):
    """GLM-4.5 to 4.7: the same experts behind the usual attention, which turns half of each head."""

    model_type = "glm4_moe"
    names = _Latent.names
    prediction = PredictionNames()

    def read_config(self, entries: Entries) -> DecoderConfig:
        moe = _experts(entries, is_normalised=bool(entries.get("norm_topk_prob", True)), is_grouped=True)
        return base_config(
            {"partial_rotary_factor": 0.5, **entries},
            moe=replace(moe, scores="sigmoid", group_votes=2),
            moe_layers=_sparse_layers(entries, usual_dense=1),
            qk_norm="head" if entries.get("use_qk_norm") else None,
        )


class Youtu(_Latent):
    """Without experts."""

    model_type = "youtu"


def _latent_config(entries: Entries, **switches: Any) -> DecoderConfig:
    query_rank = entries.get("q_lora_rank")
    latent = LatentConfig(
        rank=int(entries["kv_lora_rank"]),
        plain_dim=int(entries["qk_nope_head_dim"]),
        rope_dim=int(entries["qk_rope_head_dim"]),
        value_dim=int(entries["v_head_dim"]),
        query_rank=None if query_rank is None else int(query_rank),
        is_interleaved=bool(entries.get("rope_interleave", True)),
    )
    config = base_config({**entries, "head_dim": latent.rope_dim}, latent=latent, **switches)
    (rope,) = config.distinct_ropes
    scale = (latent.plain_dim + latent.rope_dim) ** -0.5 * _sharpness(rope)
    return replace(config, num_kv_heads=1, head_dim=latent.rope_dim + latent.rank, attention_scale=scale)


def _sharpness(rope: Rope) -> float:
    """How much stretched rotations sharpen attention."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * float(rope.mscale_all_dim) * math.log(rope.factor) + 1.0) ** 2


def _experts(entries: Entries, *, is_normalised: bool, is_grouped: bool) -> MoeConfig:
    size = int(entries["moe_intermediate_size"])
    return MoeConfig(
        num_experts=int(entries["n_routed_experts"]),
        num_experts_per_tok=int(entries["num_experts_per_tok"]),
        intermediate_size=size,
        is_normalised=is_normalised,
        shared_intermediate_size=size * int(entries.get("n_shared_experts") or 0),
        is_shared_gated=False,
        num_groups=int(entries.get("n_group") or 1) if is_grouped else 1,
        num_chosen_groups=int(entries.get("topk_group") or 1) if is_grouped else 1,
        weight_scale=float(entries.get("routed_scaling_factor") or 1.0),
    )


def _sparse_layers(entries: Entries, *, usual_dense: int) -> frozenset[int]:
    """All from `first_k_dense_replace` on that are multiples of `moe_layer_freq`."""
    first = entries.get("first_k_dense_replace")
    first, step = usual_dense if first is None else int(first), int(entries.get("moe_layer_freq") or 1)
    return frozenset(layer for layer in range(first, int(entries["num_hidden_layers"])) if layer % step == 0)
