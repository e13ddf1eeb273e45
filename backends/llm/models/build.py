"""Makes the parts of a decoder from its config and the tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from modelserver.backend import UnsupportedError

from .alibi import SlopedAttention
from .decoder import Block, DecoderLayer, GroupedQkv, Layer, PostNormLayer, SelfAttention
from .decoder_config import DecoderConfig, LatentConfig, MoeConfig, Names
from .latent_attention import HeadMatrices, LatentAttention
from .linear import DenseEmbedding, Linear, SummedLinear, TokenEmbedding
from .linear_tensors import Part
from .mlp import Mlp, activation_of
from .moe import Experts, Moe, Router, SharedExpert
from .norm import LayerNorm, Norm, RmsNorm, WholeQkNorm, identity
from .weights import Weights


class DecoderBuilder:
    """The usual parts. All raise InvalidArgumentError if the checkpoint lacks what its config asks for."""

    def __init__(self, config: DecoderConfig, names: Names, weights: Weights) -> None:
        self.config = config
        self.names = names
        self.weights = weights

    def embedding(self) -> TokenEmbedding:
        return self.weights.embedding(self._embedding_part, is_head=self._is_tied)

    @property
    def _is_tied(self) -> bool:
        return self.config.is_tied or not self.weights.has_module(self.names.head)

    def position_embedding(self) -> TokenEmbedding | None:
        """Of families that learn positions."""
        name, config = self.names.positions, self.config
        if name is None:
            return None
        shape = (config.max_position_embeddings, config.hidden_size)
        return DenseEmbedding(self.weights.tensor(f"{name}.weight", shape))

    def head(self, embedding: TokenEmbedding) -> Linear:
        """The head of its own, in whatever form it is stored; or that of the embedding's weights."""
        if self._is_tied:
            return self.weights.tied_head(self._embedding_part, embedding)
        return self.weights.head(Part(self.names.head, self.config.hidden_size, (self.config.vocab_size,)))

    def prefix(self, index: int) -> str:
        """The common prefix of the names of a layer's modules."""
        return self.names.layer.format(index) + "."

    def layer(
        self, index: int, *, attention: Block, mlp: Block, norm_of: Callable[[DecoderBuilder, str], Norm]
    ) -> DecoderLayer:
        """With norms before, after or on both sides of what is added, as the config says."""
        config, names, prefix = self.config, self.names, self.prefix(index)

        def norm(name: str) -> Norm:
            return norm_of(self, prefix + name)

        pre_norms: tuple[Norm, Norm] = (identity, identity)
        if config.has_pre_norm:
            pre_norms = (norm(names.attention_pre_norm), norm(names.mlp_pre_norm))
        if not config.has_post_norm:
            return Layer(attention=attention, mlp=mlp, attention_norm=pre_norms[0], mlp_norm=pre_norms[1])
        return PostNormLayer(
            attention=attention,
            mlp=mlp,
            attention_norms=(pre_norms[0], norm(names.attention_post_norm)),
            mlp_norms=(pre_norms[1], norm(names.mlp_post_norm)),
        )

    def attention(self, index: int, *, num_inputs: int | None = None, qkv: Linear | None = None) -> Block:
        """Of rows of the hidden size, unless `num_inputs` says otherwise.

        `qkv` gives heads of queries, keys and values behind each other, where the checkpoint's own order is another.
        """
        config, prefix = self.config, self.prefix(index)
        size = self.weights.rank.size
        rope = config.ropes[index]
        output = Part(prefix + self.names.attention_output, config.num_heads * config.head_dim, (config.hidden_size,))
        make: Callable[..., SelfAttention] = SelfAttention
        if config.slopes is not None:
            make = partial(
                SlopedAttention,
                slopes=config.slopes[self.weights.rank.share(config.num_heads, "num_heads")],
                scale=config.attention_scale,
                kept_head_dim=config.kept_head_dim,
                dtype=self.weights.dtype,
                device=self.weights.device,
            )
        return make(
            index,
            qkv=self._qkv(prefix, num_inputs or config.hidden_size) if qkv is None else qkv,
            output=self.summed(self.weights.rows(output)),
            qk_norm=self._qk_norm(prefix),
            rotation=None if rope is None else config.distinct_ropes.index(rope),
            num_heads=config.num_heads // size,
            num_kv_heads=config.num_kv_heads // size,
            head_dim=config.head_dim,
        )

    def latent_attention(self, index: int) -> Block:
        """Each rank has a share of the heads, and keeps the whole latent."""
        config, names, weights, prefix = self.config, self.names, self.weights, self.prefix(index)
        latent, rope, hidden = config.latent, config.ropes[index], config.hidden_size
        assert latent is not None, "the family's config has the sizes"
        assert rope is not None, "a part of a key is rotated"
        queries = (config.num_heads * (latent.plain_dim + latent.rope_dim),)
        down = [Part(prefix + names.latent_down, hidden, (latent.rank + latent.rope_dim,))]
        query_norm, query = None, Part(prefix + names.query, hidden, queries)
        if latent.query_rank is not None:
            down.insert(0, Part(prefix + names.query_down, hidden, (latent.query_rank,)))
            query_norm = self.latent_norm(prefix + names.latent_query_norm, latent.query_rank)
            query = Part(prefix + names.query_up, latent.query_rank, queries)
        output = Part(prefix + names.attention_output, config.num_heads * latent.value_dim, (hidden,))
        key_matrices, value_matrices, key_expansions = self._latent_matrices(prefix, latent)
        return LatentAttention(
            index,
            down=weights.whole(down),
            query=weights.columns([query]),
            query_norm=query_norm,
            query_rank=latent.query_rank or 0,
            norm=self.latent_norm(prefix + names.latent_norm, latent.rank),
            key_matrices=key_matrices,
            value_matrices=value_matrices,
            key_expansions=key_expansions,
            value_dim=latent.value_dim,
            output=self.summed(weights.rows(output)),
            rotation=config.distinct_ropes.index(rope),
            num_heads=config.num_heads // weights.rank.size,
            rope_dim=latent.rope_dim,
            rank=latent.rank,
            is_interleaved=latent.is_interleaved,
        )

    def latent_norm(self, name: str, width: int) -> Norm:
        """Of a latent: its epsilon is none of the config's."""
        return RmsNorm(self.weights.tensor(f"{name}.weight", (width,)), 1e-6)

    def _latent_matrices(
        self, prefix: str, latent: LatentConfig
    ) -> tuple[HeadMatrices, HeadMatrices, HeadMatrices | None]:
        """Of keys [heads, rank, plain_dim] and of values [heads, value_dim, rank]; and on a CPU of keys, transposed."""
        names, weights, num_heads = self.names, self.weights, self.config.num_heads
        plain, rank, value = latent.plain_dim, latent.rank, latent.value_dim
        if weights.has_module(prefix + names.latent_key):
            keys = weights.dense(Part(prefix + names.latent_key, plain, (num_heads * rank,))).unflatten(0, (-1, rank))
            values = weights.dense(Part(prefix + names.latent_value, rank, (num_heads * value,)))
            values = values.unflatten(0, (-1, value))
        else:
            both = weights.dense(Part(prefix + names.latent_up, rank, (num_heads * (plain + value),)))
            keys, values = both.unflatten(0, (-1, plain + value)).split([plain, value], dim=1)
            keys = keys.transpose(1, 2).contiguous()
        name = prefix + names.latent_up
        expansions = None
        if keys.device.type == "cpu":
            expansions = weights.by_head(name, keys.transpose(1, 2).contiguous())
        return weights.by_head(name, keys), weights.by_head(name, values), expansions

    def norm(self, name: str) -> Norm:
        shape = (self.config.hidden_size,)
        if self.config.norm_kind.startswith("layer"):
            weight, bias = self.weights.tensor(f"{name}.weight", shape), None
            if self.config.norm_kind == "layer":
                bias = self.weights.tensor(f"{name}.bias", shape)
            return LayerNorm(weight, bias, self.config.norm_eps)
        return RmsNorm(self._scale(name, shape), self.config.norm_eps)

    def feed_forward(self, index: int) -> Block:
        prefix = self.prefix(index)
        if index in self.config.moe_layers:
            return self._moe(prefix)
        return self.mlp(prefix)

    def mlp(self, prefix: str) -> Mlp:
        config, names = self.config, self.names
        hidden, size = config.hidden_size, config.intermediate_size
        if not config.is_gated:
            up = [Part(prefix + names.up, hidden, (size,))]
        elif self.weights.has_module(prefix + names.gate_up):
            up = [Part(prefix + names.gate_up, hidden, (size, size))]
        else:
            up = [Part(prefix + name, hidden, (size,)) for name in (names.gate, names.up)]
        down = self.weights.rows(Part(prefix + names.down, size, (hidden,)))
        return Mlp(
            self.weights.columns(up),
            self.summed(down),
            activation=activation_of(config.activation, is_gated=config.is_gated),
        )

    def summed(self, linear: Linear) -> Linear:
        """A layer of whose result each rank has a part, as the whole."""
        return linear if self.weights.rank.size == 1 else SummedLinear(linear, self.weights.rank.sum)

    @property
    def _embedding_part(self) -> Part:
        return Part(self.names.embedding, self.config.hidden_size, (self.config.vocab_size,))

    def _scale(self, name: str, shape: tuple[int]) -> torch.Tensor:
        """1 + w stays float32: half precision would round w away."""
        if self.config.norm_kind != "rms_plus_one":
            return self.weights.tensor(f"{name}.weight", shape)
        return self.weights.stored(f"{name}.weight", shape).float().to(self.weights.device) + 1.0

    def grouped_qkv(self, index: int) -> Linear:
        """Of a fused layer that has for each KV head its queries, its key and its value."""
        config = self.config
        sections = ((config.num_heads + 2 * config.num_kv_heads) * config.head_dim,)
        part = Part(self.prefix(index) + self.names.qkv, config.hidden_size, sections)
        return GroupedQkv(
            self.weights.columns([part]), config.num_kv_heads // self.weights.rank.size, head_dim=config.head_dim
        )

    def qkv(self, index: int) -> Linear:
        """Heads of queries, keys and values behind each other."""
        return self._qkv(self.prefix(index), self.config.hidden_size)

    def _qkv(self, prefix: str, num_inputs: int) -> Linear:
        config, names = self.config, self.names
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        fused = prefix + names.qkv
        if self.weights.has_module(fused):
            return self.weights.columns([Part(fused, num_inputs, (queries, keys, keys))])
        sizes = ((names.query, queries), (names.key, keys), (names.value, keys))
        return self.weights.columns([Part(prefix + name, num_inputs, (size,)) for name, size in sizes])

    def _qk_norm(self, prefix: str) -> Norm | None:
        config, names = self.config, self.names
        if config.qk_norm is None:
            return None
        if config.qk_norm == "all":
            return self._whole_qk_norm(prefix)
        scales = []
        for name, heads in ((names.query_norm, config.num_heads), (names.key_norm, config.num_kv_heads)):
            weight = self._scale(prefix + name, (config.head_dim,))
            scales.append(weight.expand(heads // self.weights.rank.size, -1))
        return RmsNorm(torch.cat(scales), config.norm_eps)

    def _whole_qk_norm(self, prefix: str) -> Norm:
        if self.weights.rank.size > 1:
            raise UnsupportedError(
                f"tensor_parallel_size {self.weights.rank.size} is not supported for {self.config.model_type}: "
                "it normalises over heads that lie on other ranks"
            )
        config, names = self.config, self.names
        queries, keys = (
            self.weights.tensor(f"{prefix}{name}.weight", (heads * config.head_dim,))
            for name, heads in ((names.query_norm, config.num_heads), (names.key_norm, config.num_kv_heads))
        )
        return WholeQkNorm(queries, keys, num_heads=config.num_heads, eps=config.norm_eps)

    def _moe(self, prefix: str) -> Moe:
        moe, names, hidden = self.config.moe, self.names, self.config.hidden_size
        assert moe is not None, "a sparse layer has experts"
        prefixes = [f"{prefix}{names.experts}.{expert}." for expert in range(moe.num_experts)]
        size = moe.intermediate_size
        activation = activation_of(self.config.activation, is_gated=self.config.is_gated)
        experts = Experts(
            self.weights.grouped_columns([self._expert_ups(each, size) for each in prefixes]),
            self.weights.grouped_rows([Part(each + names.expert_down, size, (hidden,)) for each in prefixes]),
            num_experts=moe.num_experts,
            activation=activation,
        )
        return Moe(
            self._router(prefix, moe),
            experts,
            shared=self._shared_expert(prefix, moe.shared_intermediate_size) if moe.shared_intermediate_size else None,
            sum_ranks=self.weights.rank.sum if self.weights.rank.size > 1 else None,
        )

    def _router(self, prefix: str, moe: MoeConfig) -> Router:
        names, shape = self.names, (moe.num_experts,)
        linear = self.weights.floats(Part(prefix + names.router, self.config.hidden_size, shape))
        correction = None
        if names.router_correction is not None and prefix + names.router_correction in self.weights.checkpoint:
            correction = self.weights.stored(prefix + names.router_correction, shape).float().to(self.weights.device)
        return Router(linear, moe, correction=correction)

    def _shared_expert(self, prefix: str, size: int) -> SharedExpert:
        """Its sum over ranks is taken with that of the others."""
        names, hidden, config = self.names, self.config.hidden_size, self.config
        inner = f"{prefix}{names.shared_expert}."
        mlp = Mlp(
            self.weights.columns(self._expert_ups(inner, size)),
            self.weights.rows(Part(inner + names.expert_down, size, (hidden,))),
            activation=activation_of(config.activation, is_gated=config.is_gated),
        )
        if config.moe is not None and not config.moe.is_shared_gated:
            return SharedExpert(mlp, None)
        return SharedExpert(mlp, self.weights.floats(Part(prefix + names.shared_expert_gate, hidden, (1,))))

    def _expert_ups(self, prefix: str, size: int) -> list[Part]:
        names, hidden = self.names, self.config.hidden_size
        return [Part(prefix + name, hidden, (size,)) for name in (names.expert_gate, names.expert_up)]
