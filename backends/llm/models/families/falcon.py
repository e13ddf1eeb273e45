"""Falcon: attention and feed-forward of the same rows, one KV head or several, rotations or ALiBi."""

from __future__ import annotations

import torch

from ...step_context import StepContext
from ..alibi import alibi_slopes
from ..build import DecoderBuilder
from ..decoder import Block, DecoderLayer
from ..decoder_config import DecoderConfig
from ..norm import Norm
from .bloom import GroupedQkv
from .readers import Entries, base_config


class Falcon(GroupedQkv):
    model_type = "falcon"

    def read_config(self, entries: Entries) -> DecoderConfig:
        self._is_grouped = bool(entries.get("has_grouped_qkv", True))  # not so in GGUF
        hidden_size = int(entries.get("n_embed") or entries["hidden_size"])
        num_layers, num_heads = int(entries["num_hidden_layers"]), int(entries["num_attention_heads"])
        is_new = bool(entries.get("new_decoder_architecture", False))
        has_one_kv_head = not is_new and entries.get("multi_query", True)
        # New decoders are parallel without saying so.
        self._is_parallel = is_new or bool(entries.get("parallel_attn", True))
        self._has_two_norms = is_new and (entries.get("num_ln_in_parallel_attn") or 2) == 2
        renamed = {
            "hidden_size": hidden_size,
            "intermediate_size": entries.get("ffn_hidden_size") or 4 * hidden_size,
            "num_key_value_heads": 1 if has_one_kv_head else entries.get("num_kv_heads") or num_heads,
            "hidden_act": entries.get("activation") or "gelu",
            "tie_word_embeddings": entries.get("tie_word_embeddings", True),
        }
        switches = {}
        if entries.get("alibi"):
            # Its biases are scaled as scores are.
            scale = (hidden_size // num_heads) ** -0.5
            switches = {
                "ropes": (None,) * num_layers,
                "slopes": tuple(slope * scale for slope in alibi_slopes(num_heads)),
            }
        return base_config(
            {**entries, **renamed},
            norm_kind="layer",
            norm_eps=float(entries.get("layer_norm_epsilon") or 1e-5),
            is_gated=False,
            **switches,
        )

    def layer(self, build: DecoderBuilder, index: int) -> DecoderLayer:
        if not self._is_parallel:
            return super().layer(build, index)
        prefix = build.prefix(index)
        names = ("ln_attn", "ln_mlp") if self._has_two_norms else ("input_layernorm",)
        norms = [self.norm(build, prefix + name) for name in names]
        return ParallelLayer(self.attention(build, index), self.feed_forward(build, index), norms)


class ParallelLayer:
    """Attention and feed-forward of the same rows, behind one norm or one each."""

    def __init__(self, attention: Block, mlp: Block, norms: list[Norm]) -> None:
        self._attention = attention
        self._mlp = mlp
        self._norms = norms

    def __call__(self, hidden: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        normed = [norm(hidden) for norm in self._norms]
        return self._mlp.add_to(self._attention.add_to(hidden, normed[0], step), normed[-1], step)
