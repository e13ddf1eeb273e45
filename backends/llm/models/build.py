"""Puts a decoder together from its config and the tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .config import DecoderConfig
from .decoder import Decoder, FeedForward, Layer
from .linear import Linear
from .mlp import Mlp, activation_of
from .names import Names, names_of
from .norm import LayerNorm, Norm, RmsNorm, identity
from .weights import Part, Weights

# Wraps a layer whose ranks each have a part of the sum.
Reduce = Callable[[Linear], Linear]


def build_decoder(config: DecoderConfig, weights: Weights, *, max_len: int) -> Decoder:
    """InvalidArgumentError if the checkpoint lacks what its config asks for."""
    names = names_of(config.model_type)
    embedding = weights.tensor(f"{names.embedding}.weight")
    head = names.embedding if config.is_tied or f"{names.head}.weight" not in weights else names.head
    builder = _Builder(config, weights, names)
    return Decoder(
        config,
        embedding=embedding,
        positions=None if names.positions is None else weights.tensor(f"{names.positions}.weight"),
        layers=[builder.layer(index) for index in range(config.num_layers)],
        norm=builder.norm(names.norm),
        head=weights.head(head),
        max_len=max_len,
    )


class _Builder:
    def __init__(self, config: DecoderConfig, weights: Weights, names: Names) -> None:
        self._config = config
        self._weights = weights
        self._names = names

    def layer(self, index: int) -> Layer:
        config, names = self._config, self._names
        size = self._weights.rank.size
        prefix = names.layer.format(index) + "."
        return Layer(
            index,
            qkv=self._qkv(prefix),
            output=self._weights.rows(Part(prefix + names.attention_output)),
            mlp=self._mlp(prefix, index),
            attention_norm=self.norm(prefix + names.attention_pre_norm) if config.has_pre_norm else identity,
            mlp_norm=self.norm(prefix + names.mlp_pre_norm) if config.has_pre_norm else identity,
            post_norms=(
                (self.norm(prefix + names.attention_post_norm), self.norm(prefix + names.mlp_post_norm))
                if config.has_post_norm
                else None
            ),
            qk_norm=self._qk_norm(prefix),
            num_heads=config.num_heads // size,
            num_kv_heads=config.num_kv_heads // size,
            head_dim=config.head_dim,
        )

    def norm(self, name: str) -> Norm:
        weight = self._weights.tensor(f"{name}.weight")
        if self._config.norm_kind == "layer":
            return LayerNorm(weight, self._weights.tensor(f"{name}.bias"), self._config.norm_eps)
        return RmsNorm(self._scale(weight, name), self._config.norm_eps)

    def _scale(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        """1 + w stays float32: half precision would round w away."""
        if self._config.norm_kind != "rms_plus_one":
            return weight
        return self._weights.checkpoint.tensor(f"{name}.weight").float().to(weight.device) + 1.0

    def _qkv(self, prefix: str) -> Linear:
        config, names = self._config, self._names
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        fused = prefix + names.qkv
        if f"{fused}.weight" in self._weights:
            return self._weights.columns([Part(fused, (queries, keys, keys))])
        return self._weights.columns([Part(prefix + name) for name in (names.query, names.key, names.value)])

    def _qk_norm(self, prefix: str) -> Norm | None:
        config, names = self._config, self._names
        if config.qk_norm is None:
            return None
        scales = []
        for name, heads in ((names.query_norm, config.num_heads), (names.key_norm, config.num_kv_heads)):
            weight = self._scale(self._weights.tensor(f"{prefix}{name}.weight"), prefix + name)
            scales.append(weight.expand(heads // self._weights.rank.size, -1))
        return RmsNorm(torch.cat(scales), config.norm_eps)

    def _mlp(self, prefix: str, index: int) -> FeedForward:
        config, names = self._config, self._names
        fused = prefix + names.gate_up
        if not config.is_gated:
            up = [Part(prefix + names.up)]
        elif f"{fused}.weight" in self._weights:
            up = [Part(fused, (config.intermediate_size, config.intermediate_size))]
        else:
            up = [Part(prefix + names.gate), Part(prefix + names.up)]
        return Mlp(
            self._weights.columns(up),
            self._weights.rows(Part(prefix + names.down)),
            activation=activation_of(config.activation),
            is_gated=config.is_gated,
        )
