"""Puts a decoder together from its config and the tensors of its checkpoint."""

from __future__ import annotations

import torch

from modelserver.backend import UnsupportedError

from .config import DecoderConfig
from .decoder import Decoder, FeedForward, Layer
from .linear import Linear, SummedLinear
from .mlp import Mlp, activation_of
from .moe import Moe, SharedExpert
from .names import Names, names_of
from .norm import LayerNorm, Norm, RmsNorm, WholeQkNorm, identity
from .weights import Part, Weights


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
            output=self._reduced(self._weights.rows(Part(prefix + names.attention_output))),
            mlp=self._feed_forward(prefix, index),
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
        if config.qk_norm == "all":
            return self._whole_qk_norm(prefix)
        scales = []
        for name, heads in ((names.query_norm, config.num_heads), (names.key_norm, config.num_kv_heads)):
            weight = self._scale(self._weights.tensor(f"{prefix}{name}.weight"), prefix + name)
            scales.append(weight.expand(heads // self._weights.rank.size, -1))
        return RmsNorm(torch.cat(scales), config.norm_eps)

    def _whole_qk_norm(self, prefix: str) -> Norm:
        if self._weights.rank.size > 1:
            raise UnsupportedError(
                f"tensor_parallel_size {self._weights.rank.size} is not supported for {self._config.model_type}: "
                "it normalises over heads that lie on other ranks"
            )
        queries, keys = (
            self._weights.tensor(f"{prefix}{name}.weight") for name in (self._names.query_norm, self._names.key_norm)
        )
        return WholeQkNorm(queries, keys, num_heads=self._config.num_heads, eps=self._config.norm_eps)

    def _feed_forward(self, prefix: str, index: int) -> FeedForward:
        if index in self._config.moe_layers:
            return self._moe(prefix)
        return self._mlp(prefix)

    def _moe(self, prefix: str) -> Moe:
        moe, names = self._config.moe, self._names
        assert moe is not None, "a sparse layer has experts"
        experts = [
            self._expert(
                [Part(f"{prefix}{names.experts}.{expert}.{name}") for name in (names.expert_gate, names.expert_up)],
                Part(f"{prefix}{names.experts}.{expert}.{names.expert_down}"),
            )
            for expert in range(moe.num_experts)
        ]
        shared = None
        if moe.shared_intermediate_size:
            inner = f"{prefix}{names.shared_expert}."
            shared = SharedExpert(
                self._expert([Part(f"{inner}gate_proj"), Part(f"{inner}up_proj")], Part(f"{inner}down_proj")),
                self._weights.tensor(f"{prefix}{names.shared_expert_gate}.weight"),
            )
        return Moe(
            self._weights.tensor(f"{prefix}{names.router}.weight"),
            experts,
            num_experts_per_tok=moe.num_experts_per_tok,
            is_normalised=moe.is_normalised,
            shared=shared,
            sum_ranks=self._weights.rank.sum if self._weights.rank.size > 1 else None,
        )

    def _mlp(self, prefix: str) -> Mlp:
        config, names = self._config, self._names
        fused = prefix + names.gate_up
        if not config.is_gated:
            up = [Part(prefix + names.up)]
        elif f"{fused}.weight" in self._weights:
            up = [Part(fused, (config.intermediate_size, config.intermediate_size))]
        else:
            up = [Part(prefix + names.gate), Part(prefix + names.up)]
        return self._feed(up, self._reduced(self._weights.rows(Part(prefix + names.down))))

    def _expert(self, gate_up: list[Part], down: Part) -> Mlp:
        """Of a mixture, whose sum is taken over ranks once, for all experts."""
        return self._feed(gate_up, self._weights.rows(down))

    def _feed(self, up: list[Part], down: Linear) -> Mlp:
        config = self._config
        return Mlp(
            self._weights.columns(up), down, activation=activation_of(config.activation), is_gated=config.is_gated
        )

    def _reduced(self, linear: Linear) -> Linear:
        return linear if self._weights.rank.size == 1 else SummedLinear(linear, self._weights.rank.sum)
