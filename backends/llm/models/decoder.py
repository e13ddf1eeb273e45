"""One decoder for all families that differ only in switches of `DecoderConfig`. Inference alone; no autograd."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, Protocol

import torch

from ..attention.paged import Rotation
from ..step_context import StepContext, Taps
from .cpu_layers import JoinableLayer, JoinedLayers, join_layers, joinable_layer
from .decoder_config import DecoderConfig
from .linear import Linear, TokenEmbedding
from .mlp import Mlp
from .norm import Norm, RmsNorm


class SelfAttention:
    """`rotation` says which of the step's rotations turns queries and keys; None: none does.

    `num_heads` query heads and `num_kv_heads` key and value heads of `head_dim` are this rank's.
    """

    def __init__(
        self,
        layer: int,
        *,
        qkv: Linear,
        output: Linear,
        qk_norm: Norm | None,
        rotation: int | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.layer = layer
        self.qkv = qkv
        self.output = output
        self.qk_norm = qk_norm
        self.rotation = rotation
        self._num_turned = num_heads + num_kv_heads
        self._heads_shape = (num_heads + 2 * num_kv_heads, head_dim)

    def __call__(self, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self.output(self._mixed(rows, step), step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self.output.add_to(residual, self._mixed(rows, step), step)

    def _mixed(self, rows: torch.Tensor, step: StepContext) -> torch.Tensor:
        heads = self.qkv(rows, step).view(rows.shape[0], *self._heads_shape)
        rotation = None if self.rotation is None else step.rotations[self.rotation]
        norm = self.qk_norm
        if norm is not None:
            attention: Any = step.attention
            if isinstance(norm, RmsNorm) and norm.is_of_heads(heads.dtype) and getattr(attention, "fuses_norm", False):
                found: torch.Tensor = attention.rope_and_attend(
                    self.layer, heads, rotation, step.inputs, (norm.weight, norm.eps)
                )
                return found
            turned = heads[:, : self._num_turned]
            turned.copy_(norm(turned))
        return step.attention.rope_and_attend(self.layer, heads, rotation, step.inputs)


class GroupedQkv:
    """A layer of which each KV head has its queries, its key and its value together, as one of all queries, all keys
    and all values.
    """

    def __init__(self, linear: Linear, num_kv_heads: int, *, head_dim: int) -> None:
        self._linear = linear
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        groups = self._linear(rows, step).view(rows.shape[0], self._num_kv_heads, -1, self._head_dim)
        parts = (groups[:, :, :-2].flatten(1), groups[:, :, -2].flatten(1), groups[:, :, -1].flatten(1))
        return torch.cat(parts, dim=1)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return residual.add_(self(rows, step))


class Block(Protocol):
    """Attention or feed-forward of a layer: rows [tokens, hidden_size] to the same."""

    def __call__(self, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        """The residual and the result; the residual may be changed in place."""
        ...


class DecoderLayer(Protocol):
    def __call__(self, hidden: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        """[tokens, hidden_size] -> the same; `hidden` may be changed in place."""
        ...


class Layer:
    """Attention and feed-forward around one residual stream, each behind a norm."""

    def __init__(self, *, attention: Block, mlp: Block, attention_norm: Norm, mlp_norm: Norm) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.mlp_norm = mlp_norm

    def __call__(self, hidden: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        hidden = self.attention.add_to(hidden, self.attention_norm(hidden), step)
        return self.mlp.add_to(hidden, self.mlp_norm(hidden), step)


class PostNormLayer:
    """The same with norms of what is added, too. A norm that the family lacks is the identity."""

    def __init__(
        self, *, attention: Block, mlp: Block, attention_norms: tuple[Norm, Norm], mlp_norms: tuple[Norm, Norm]
    ) -> None:
        """`..._norms`: before and after."""
        self._attention = attention
        self._mlp = mlp
        self._attention_norms = attention_norms
        self._mlp_norms = mlp_norms

    def __call__(self, hidden: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        before, after = self._attention_norms
        hidden = hidden + after(self._attention(before(hidden), step))
        before, after = self._mlp_norms
        return hidden + after(self._mlp(before(hidden), step))


class Decoder:
    """Token ids in, hidden states out; `logits` makes scores of those rows that need them.

    `positions` [positions, hidden_size] are embeddings of positions, where the family has them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: TokenEmbedding,
        positions: TokenEmbedding | None,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Linear,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._positions = positions
        self._layers = tuple(layers)
        self._joined: JoinedLayers | None = None
        if dtype == torch.float32 and device.type == "cpu":
            self._joined = join_layers(list(map(_joinable, self._layers)))
        self._norm = norm
        self._head = head
        self._tables = [rope_tables(*rope.tables(max_len), dtype, device) for rope in config.distinct_ropes]
        self._axes = [rope.axes().to(device) if rope.sections else None for rope in config.distinct_ropes]

    def __call__(self, input_ids: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        """`input_ids` [tokens] -> [tokens, hidden_size], normalised."""
        hidden, taps = self.embedded(input_ids, step), step.taps
        if taps is not None and min(taps.layers) < len(self._layers):
            hidden = self._tapped(hidden, step, taps)
        elif self._joined is None or not self._joined.compute(hidden, step):
            for layer in self._layers:
                hidden = layer(hidden, step)
        if taps is not None and len(self._layers) in taps.layers:
            taps.found.append(hidden)
        return self._norm(hidden)

    def _tapped(self, hidden: torch.Tensor, step: StepContext, taps: Taps) -> torch.Tensor:
        for index, layer in enumerate(self._layers):
            if index in taps.layers:
                taps.found.append(hidden.clone())  # layers change it in place
            hidden = layer(hidden, step)
        return hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What tokens are before the first layer, [tokens, hidden_size], without positions."""
        hidden = self._embedding(token_ids)
        return hidden if self.config.embedding_scale == 1.0 else hidden * self.config.embedding_scale

    def embedded(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """What the first layer gets, [tokens, hidden_size]; the step is made ready for all layers."""
        positions = step.positions
        hidden = self.embed(input_ids)
        if step.pictures is not None:
            hidden = step.pictures.put(hidden)
        if self._positions is not None:
            hidden = hidden + self._positions(positions)
        if positions.dim() == 1:
            step.rotations = tuple(Rotation(cosines[positions], sines[positions]) for cosines, sines in self._tables)
        else:
            step.rotations = tuple(map(_rotation_by_axes, self._tables, self._axes, repeat(positions)))
        return hidden

    def normalised(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `logits` gets of what the last layer makes."""
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows [rows, hidden_size], chosen from any step: float32 [rows, vocab_size]."""
        return self.scores(hidden).float()

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the datatype that the head gives, which holds them exactly."""
        scores, softcap = self._head(hidden, None), self.config.logit_softcap
        return scores if softcap is None else torch.tanh(scores.float() / softcap) * softcap


def _joinable(layer: DecoderLayer) -> JoinableLayer | None:
    """Of a layer that computes exactly what the kernels do."""
    if type(layer) is not Layer or type(layer.attention) is not SelfAttention or type(layer.mlp) is not Mlp:
        return None
    attention, mlp = layer.attention, layer.mlp
    if not mlp.is_gated_by_silu:
        return None
    return joinable_layer(
        index=attention.layer,
        rotation=attention.rotation,
        attention_norm=layer.attention_norm,
        mlp_norm=layer.mlp_norm,
        head_norm=attention.qk_norm,
        products=(attention.qkv, attention.output, mlp.up, mlp.down),
    )


def _rotation_by_axes(
    tables: tuple[torch.Tensor, torch.Tensor], axes: torch.Tensor | None, positions: torch.Tensor
) -> Rotation:
    """Each value turned by its own axis of `positions` [3, tokens]."""
    assert axes is not None, "positions by axes come with rotations in sections"
    index = axes.expand(1, positions.shape[1], 1, -1)
    cosines, sines = (table[positions].gather(0, index)[0] for table in tables)
    return Rotation(cosines, sines)


def rope_tables(
    cosines: torch.Tensor, sines: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[positions, 1, rotated] in the dtype and on the device of the network, as `Rotation` wants them."""
    sines = sines.clone()
    sines[:, : sines.shape[1] // 2].neg_()
    return cosines.to(device, dtype)[:, None], sines.to(device, dtype)[:, None]
