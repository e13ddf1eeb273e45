"""One decoder for all families that differ only in switches of `DecoderConfig`. Inference alone; no autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..attention.paged import PagedAttention, Rotation
from .config import DecoderConfig
from .linear import Linear
from .mlp import Mlp
from .norm import Norm


class FeedForward(Protocol):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor: ...


class Layer:
    """Attention and feed-forward around one residual stream. A norm that the family lacks is the identity."""

    def __init__(
        self,
        index: int,
        *,
        qkv: Linear,
        output: Linear,
        mlp: FeedForward | Mlp,
        attention_norm: Norm,
        mlp_norm: Norm,
        post_norms: tuple[Norm, Norm] | None,
        qk_norm: Norm | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self._index = index
        self._qkv = qkv
        self._output = output
        self._mlp = mlp
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm
        self._post_norms = post_norms
        self._qk_norm = qk_norm
        self._num_heads = num_heads
        self._num_turned = num_heads + num_kv_heads
        self._kv_shape = (2, num_kv_heads, head_dim)
        self._heads_shape = (num_heads + 2 * num_kv_heads, head_dim)

    def __call__(
        self, hidden: torch.Tensor, rotation: Rotation | None, attention: PagedAttention, inputs: Any
    ) -> torch.Tensor:
        rows = hidden.shape[0]
        heads = self._qkv(self._attention_norm(hidden)).view(rows, *self._heads_shape)
        if self._qk_norm is not None:
            turned = heads[:, : self._num_turned]
            turned.copy_(self._qk_norm(turned))
        if attention.is_turning:
            mixed = attention.turn_and_attend(self._index, heads, rotation, inputs)
        else:
            if rotation is not None:
                rotation.turn(heads[:, : self._num_turned])
            queries = heads[:, : self._num_heads]
            kv = heads[:, self._num_heads :].view(rows, *self._kv_shape)
            mixed = attention(self._index, queries, kv, inputs)
        if self._post_norms is None:
            hidden = self._output.add_to(hidden, mixed)
            return self._mlp.add_to(hidden, self._mlp_norm(hidden))
        hidden = hidden + self._post_norms[0](self._output(mixed))
        return hidden + self._post_norms[1](self._mlp(self._mlp_norm(hidden)))


class Decoder:
    """Token ids in, hidden states out; `logits` makes scores of those rows that need them."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: torch.Tensor,
        positions: torch.Tensor | None,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        max_len: int,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._positions = positions
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        # Most families turn all layers alike: tables are kept once.
        self._tables = {
            rope: _turning_tables(*rope.tables(max_len), embedding) for rope in set(config.ropes) if rope is not None
        }

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: PagedAttention, inputs: Any
    ) -> torch.Tensor:
        """`input_ids` and `positions` [tokens] -> [tokens, hidden_size], normalised."""
        hidden = F.embedding(input_ids, self._embedding)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self.config.embedding_scale
        if self._positions is not None:
            hidden = hidden + F.embedding(positions, self._positions)
        rotations = {
            rope: Rotation(cosines[positions], sines[positions]) for rope, (cosines, sines) in self._tables.items()
        }
        for layer, rope in zip(self._layers, self.config.ropes, strict=True):
            hidden = layer(hidden, None if rope is None else rotations[rope], attention, inputs)
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [rows, hidden_size]: float32 [rows, vocab_size]."""
        logits = self._head(hidden).float()
        softcap = self.config.logit_softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _turning_tables(
    cosines: torch.Tensor, sines: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[positions, 1, rotated] in the dtype and on the device of the network, as `Rotation` wants them."""
    sines = sines.clone()
    sines[:, : sines.shape[1] // 2].neg_()
    return cosines.to(like)[:, None], sines.to(like)[:, None]
