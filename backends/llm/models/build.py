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
    hidden = config.hidden_size
    embedding = weights.tensor(f"{names.embedding}.weight", (config.vocab_size, hidden))
    head = names.embedding if config.is_tied or f"{names.head}.weight" not in weights else names.head
    builder = _Builder(config, weights, names)
    return Decoder(
        config,
        embedding=embedding,
        positions=(
            weights.tensor(f"{names.positions}.weight", (config.max_position_embeddings, hidden))
            if names.positions is not None
            else None
        ),
        layers=[builder.layer(index) for index in range(config.num_layers)],
        norm=builder.norm(names.norm),
        head=weights.head(Part(head, hidden, (config.vocab_size,))),
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
            output=self._reduced(self._weights.rows(self._attention_output(prefix))),
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
        shape = (self._config.hidden_size,)
        if self._config.norm_kind == "layer":
            weight, bias = (self._weights.tensor(f"{name}.{part}", shape) for part in ("weight", "bias"))
            return LayerNorm(weight, bias, self._config.norm_eps)
        return RmsNorm(self._scale(name, shape), self._config.norm_eps)

    def _scale(self, name: str, shape: tuple[int]) -> torch.Tensor:
        """1 + w stays float32: half precision would round w away."""
        if self._config.norm_kind != "rms_plus_one":
            return self._weights.tensor(f"{name}.weight", shape)
        return self._weights.stored(f"{name}.weight", shape).float().to(self._weights.device) + 1.0

    def _qkv(self, prefix: str) -> Linear:
        config, names = self._config, self._names
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        fused, hidden = prefix + names.qkv, config.hidden_size
        if f"{fused}.weight" in self._weights:
            return self._weights.columns([Part(fused, hidden, (queries, keys, keys))])
        sizes = ((names.query, queries), (names.key, keys), (names.value, keys))
        return self._weights.columns([Part(prefix + name, hidden, (size,)) for name, size in sizes])

    def _attention_output(self, prefix: str) -> Part:
        config = self._config
        return Part(prefix + self._names.attention_output, config.num_heads * config.head_dim, (config.hidden_size,))

    def _qk_norm(self, prefix: str) -> Norm | None:
        config, names = self._config, self._names
        if config.qk_norm is None:
            return None
        if config.qk_norm == "all":
            return self._whole_qk_norm(prefix)
        scales = []
        for name, heads in ((names.query_norm, config.num_heads), (names.key_norm, config.num_kv_heads)):
            weight = self._scale(prefix + name, (config.head_dim,))
            scales.append(weight.expand(heads // self._weights.rank.size, -1))
        return RmsNorm(torch.cat(scales), config.norm_eps)

    def _whole_qk_norm(self, prefix: str) -> Norm:
        if self._weights.rank.size > 1:
            raise UnsupportedError(
                f"tensor_parallel_size {self._weights.rank.size} is not supported for {self._config.model_type}: "
                "it normalises over heads that lie on other ranks"
            )
        config = self._config
        queries, keys = (
            self._weights.tensor(f"{prefix}{name}.weight", (heads * config.head_dim,))
            for name, heads in ((self._names.query_norm, config.num_heads), (self._names.key_norm, config.num_kv_heads))
        )
        return WholeQkNorm(queries, keys, num_heads=config.num_heads, eps=config.norm_eps)

    def _feed_forward(self, prefix: str, index: int) -> FeedForward:
        if index in self._config.moe_layers:
            return self._moe(prefix)
        return self._mlp(prefix)

    def _moe(self, prefix: str) -> Moe:
        moe, names, hidden = self._config.moe, self._names, self._config.hidden_size
        assert moe is not None, "a sparse layer has experts"
        experts = [
            self._expert(f"{prefix}{names.experts}.{expert}.", moe.intermediate_size)
            for expert in range(moe.num_experts)
        ]
        shared = None
        if moe.shared_intermediate_size:
            shared = SharedExpert(
                self._expert(f"{prefix}{names.shared_expert}.", moe.shared_intermediate_size),
                self._weights.tensor(f"{prefix}{names.shared_expert_gate}.weight", (1, hidden)),
            )
        return Moe(
            self._weights.tensor(f"{prefix}{names.router}.weight", (moe.num_experts, hidden)),
            experts,
            num_experts_per_tok=moe.num_experts_per_tok,
            is_normalised=moe.is_normalised,
            shared=shared,
            sum_ranks=self._weights.rank.sum if self._weights.rank.size > 1 else None,
        )

    def _mlp(self, prefix: str) -> Mlp:
        config, names = self._config, self._names
        hidden, size = config.hidden_size, config.intermediate_size
        fused = prefix + names.gate_up
        if not config.is_gated:
            up = [Part(prefix + names.up, hidden, (size,))]
        elif f"{fused}.weight" in self._weights:
            up = [Part(fused, hidden, (size, size))]
        else:
            up = [Part(prefix + name, hidden, (size,)) for name in (names.gate, names.up)]
        return self._feed(up, self._reduced(self._weights.rows(Part(prefix + names.down, size, (hidden,)))))

    def _expert(self, prefix: str, size: int) -> Mlp:
        """Of a mixture, whose sum is taken over ranks once, for all experts."""
        names, hidden = self._names, self._config.hidden_size
        gate_up = [Part(prefix + name, hidden, (size,)) for name in (names.expert_gate, names.expert_up)]
        return self._feed(gate_up, self._weights.rows(Part(prefix + names.expert_down, size, (hidden,))))

    def _feed(self, up: list[Part], down: Linear) -> Mlp:
        config = self._config
        return Mlp(
            self._weights.columns(up), down, activation=activation_of(config.activation), is_gated=config.is_gated
        )

    def _reduced(self, linear: Linear) -> Linear:
        return linear if self._weights.rank.size == 1 else SummedLinear(linear, self._weights.rank.sum)
