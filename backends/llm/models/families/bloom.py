"""Bloom: linear biases by position, a norm behind the embedding, queries, keys and values of a head side by side."""

from __future__ import annotations

import torch

from modelserver.backend import UnsupportedError

from ..alibi import alibi_slopes
from ..build import DecoderBuilder
from ..decoder import Block
from ..decoder_config import DecoderConfig, Names
from ..linear import TokenEmbedding
from ..norm import Norm
from .family import Family
from .readers import Entries, older_config


class GroupedQkv(Family):
    """What Bloom and Falcon share: names, and queries, keys and values of a group of heads side by side."""

    names = Names(
        embedding="word_embeddings",
        norm="ln_f",
        layer="h.{}",
        qkv="self_attention.query_key_value",
        attention_output="self_attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
    _is_grouped = True

    def attention(self, build: DecoderBuilder, index: int) -> Block:
        return build.attention(index, qkv=build.grouped_qkv(index) if self._is_grouped else None)


class Bloom(GroupedQkv):
    model_type = "bloom"

    def read_config(self, entries: Entries) -> DecoderConfig:
        if entries.get("apply_residual_connection_post_layernorm"):
            raise UnsupportedError(
                "config.json of this bloom has apply_residual_connection_post_layernorm, which is not supported"
            )
        self._is_grouped = bool(entries.get("has_grouped_qkv", True))  # not so in GGUF
        hidden_size = int(entries.get("n_embed") or entries["hidden_size"])
        num_layers, num_heads = (
            int(entries.get(old) or entries[new])
            for old, new in (("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"))
        )
        renamed = {
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "max_position_embeddings": entries.get("seq_length"),
            "hidden_act": "gelu_new",
            "tie_word_embeddings": entries.get("tie_word_embeddings", True),
        }
        return older_config(entries, renamed, slopes=alibi_slopes(num_heads))

    def tokens(self, build: DecoderBuilder, embedding: TokenEmbedding) -> TokenEmbedding:
        return _Normed(embedding, self.norm(build, "word_embeddings_layernorm"))


class _Normed:
    def __init__(self, embedding: TokenEmbedding, norm: Norm) -> None:
        self._embedding = embedding
        self._norm = norm

    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        return self._norm(self._embedding(token_ids))
