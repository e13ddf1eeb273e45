"""One kind of decoder: how its config reads, what its tensors are called, and which parts of its network differ."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ...attention.kv_blocks import KvLayout
from ...checkpoint import Checkpoint, config_path, text_config
from ..build import DecoderBuilder
from ..decoder import Block, Decoder, DecoderLayer
from ..decoder_config import DecoderConfig, Names
from ..draft_head import DraftHead, JoinedLayer, PredictionNames
from ..linear import Linear, TokenEmbedding
from ..linear_tensors import Part
from ..norm import Norm, identity
from .readers import Entries, base_config


class Family:
    """The usual decoder; a family overrides what is its own. `model_type` is that of config.json.

    Of a multi-modal model, whose decoder lies in `text_config`, it is the type of that part.
    """

    model_type: ClassVar[str]
    names: ClassVar[Names] = Names()
    # Of families whose checkpoints carry a layer for multi-token prediction.
    prediction: ClassVar[PredictionNames | None] = None

    def read_config(self, entries: Entries) -> DecoderConfig:
        """From the entries of config.json. Whatever they lack or have wrong may raise KeyError, ValueError and such."""
        return base_config(entries)

    # The network, part by part. `build` makes the usual ones.

    def network(self, build: DecoderBuilder, *, max_len: int) -> Decoder:
        embedding = build.embedding()
        return Decoder(
            build.config,
            embedding=self.tokens(build, embedding),
            positions=self.positions(build),
            layers=[self.layer(build, index) for index in range(build.config.num_layers)],
            norm=self.norm(build, build.names.norm),
            head=self.head(build, embedding),
            max_len=max_len,
            dtype=build.weights.dtype,
            device=build.weights.device,
        )

    def tokens(self, build: DecoderBuilder, embedding: TokenEmbedding) -> TokenEmbedding:  # noqa: ARG002
        """What tokens are before the first layer."""
        return embedding

    def positions(self, build: DecoderBuilder) -> TokenEmbedding | None:
        """What positions add to them, if anything."""
        return build.position_embedding()

    def layer(self, build: DecoderBuilder, index: int) -> DecoderLayer:
        """The residual stream around attention and feed-forward."""
        return build.layer(
            index, attention=self.attention(build, index), mlp=self.feed_forward(build, index), norm_of=self.norm
        )

    def attention(self, build: DecoderBuilder, index: int) -> Block:
        return build.attention(index)

    def feed_forward(self, build: DecoderBuilder, index: int) -> Block:
        return build.feed_forward(index)

    def norm(self, build: DecoderBuilder, name: str) -> Norm:
        return build.norm(name)

    def head(self, build: DecoderBuilder, embedding: TokenEmbedding) -> Linear:
        return build.head(embedding)

    def kv_layout(self, config: DecoderConfig, dtype: torch.dtype, *, num_ranks: int) -> KvLayout:
        """The KV cache's layout per token on one of `num_ranks` tensor-parallel ranks."""
        return KvLayout.uniform(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads // num_ranks,
            head_dim=config.kept_head_dim,
            dtype=dtype,
        )

    def draft_head(self, build: DecoderBuilder, network: Decoder, *, max_len: int) -> DraftHead:
        """The layer for multi-token prediction. UnsupportedError if the family, or the checkpoint, has none.

        Embedding and head are the network's own: checkpoints repeat them.
        """
        names, config, weights = self.prediction, build.config, build.weights
        place = None if names is None else names.layer.format(config.num_layers)
        if names is None or place is None or not weights.has_module(f"{place}.{names.join}"):
            raise UnsupportedError(
                f"speculative_config.method mtp: the checkpoint in {weights.checkpoint.place} has no layer for "
                f"multi-token prediction{f' ({place}.{names.join})' if names else ''} that is computed here: remove "
                "speculative_config, or name another method"
            )
        is_sparse = weights.has_module(f"{place}.{build.names.router}")
        alone = replace(
            config,
            num_layers=1,
            windows=(None,),
            ropes=config.ropes[-1:],
            moe_layers=frozenset([0] if is_sparse else []),
        )
        inner = DecoderBuilder(alone, replace(build.names, layer=place), weights)
        width = config.hidden_size
        joined = JoinedLayer(
            self.layer(inner, 0),
            weights.whole([Part(f"{place}.{names.join}", 2 * width, (width,))]),
            embedding_norm=self.norm(inner, f"{place}.{names.embedding_norm}"),
            hidden_norm=self.norm(inner, f"{place}.{names.hidden_norm}"),
            is_hidden_first=names.is_hidden_first,
        )
        return DraftHead(
            joined,
            self.kv_layout(alone, weights.dtype, num_ranks=1).group,
            scale=alone.attention_scale,
            rope=alone.distinct_ropes[0],
            layers=(config.num_layers,),
            read=network.normalised if names.reads_normalised else identity,
            embed=network.embed,
            norm=self.norm(inner, f"{place}.{names.norm}"),
            logits=network.logits,
            max_len=max_len,
            device=weights.device,
        )

    def config_of(self, checkpoint: Checkpoint) -> DecoderConfig:
        """InvalidArgumentError for an entry that is missing or wrong, UnsupportedError for an unknown rotation."""
        entries, path = text_config(checkpoint), config_path(checkpoint)
        try:
            config = self.read_config(entries)
        except KeyError as error:
            raise InvalidArgumentError(f"{path} of a {self.model_type} has no {error.args[0]}") from None
        except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError, MemoryError) as error:
            raise InvalidArgumentError(
                f"{path} of a {self.model_type} has an entry that cannot be used: {type(error).__name__}: {error}"
            ) from error
        config.check(path)
        return replace(config, eos_token_ids=checkpoint.eos_token_ids)
