"""Latent attention (DeepSeek V2 and V3): a token keeps one narrow vector, which all heads share.

That vector, the latent, expands to the keys and values of all heads. Few queries expand nothing: the matrix that makes
keys goes into the queries, and the one that makes values into what comes out of attention. So heads attend to the
latents themselves, and all of them through one KV head. Many queries of one text, on a CPU, attend to the keys and
values that the latents expand to: a pair of a query and a key then takes a third of the arithmetic.
"""

from __future__ import annotations

import torch

from ..attention.cpu_attention import CpuAttention, CpuInputs
from ..attention.paged import Rotation
from ..kernels import has_fast_packed_kernels, packed_kernels_for
from ..step_context import StepContext
from .linear import Linear, dtype_name
from .norm import Norm
from .packed_matrix import PackedExperts, PackedMatrixLinear, pack_floats


class HeadMatrices:
    """A matrix for each head: `weight` [heads, outputs, inputs] in floats.

    On a CPU with kernels they are one product, in which a row's result does not depend on other rows. Values that have
    no more than 16 bits are kept in 16.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed: PackedExperts | None = None
        self._counts = torch.empty(0, dtype=torch.int64)
        kernels = packed_kernels_for(weight.device)
        if kernels is not None and has_fast_packed_kernels(weight.device):
            stored = _narrowed(weight)
            self._heads = [PackedMatrixLinear(pack_floats(one, kernels), None) for one in stored]
            self._packed = PackedExperts([[head] for head in self._heads])
            self.form, self.num_bytes = self._packed.form, self._packed.num_bytes
        else:
            self._transposed = weight.transpose(1, 2).contiguous()
            self.form, self.num_bytes = dtype_name(weight.dtype), weight.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, inputs] -> [tokens, heads, outputs]."""
        by_head = rows.transpose(0, 1)
        if self._packed is None:
            return torch.bmm(by_head, self._transposed).transpose(0, 1)
        num_heads, num_tokens, _ = by_head.shape
        if not len(self._counts) or self._counts[0] != num_tokens:
            self._counts = torch.full((num_heads,), num_tokens)
        outputs = self._packed(by_head.flatten(0, 1), self._counts, None)
        return outputs.view(num_heads, num_tokens, -1).transpose(0, 1)

    def spread(self, rows: torch.Tensor, outputs: torch.Tensor) -> None:
        """The same `rows` [tokens, inputs] through all heads, into `outputs` [tokens, heads, outputs]."""
        if self._packed is None:
            outputs.copy_(torch.matmul(rows, self._transposed).transpose(0, 1))
            return
        for number, head in enumerate(self._heads):
            outputs[:, number] = head(rows, None)


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """In 16 bits, if it has no more."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.to(weight.dtype), weight):
            return narrow
    return weight


class LatentAttention:
    """A block of `Decoder`. What a token keeps is its rotated key [rope_dim], and behind it the latent [rank].

    `down` makes latent and key of a row. With `query_norm` it makes `query_rank` values before them, of which `query`
    makes the queries; without, `query` makes them of the row. `key_matrices` [part of a query that is not rotated ->
    rank] and `value_matrices` [rank -> value_dim] are those of the heads; `key_expansions` are the former the other way
    round, where many queries attend to expanded keys. `is_interleaved`: neighbours of a head make
    pairs that are rotated, not its halves.
    """

    def __init__(
        self,
        layer: int,
        *,
        down: Linear,
        query: Linear,
        query_norm: Norm | None,
        query_rank: int,
        norm: Norm,
        key_matrices: HeadMatrices,
        value_matrices: HeadMatrices,
        key_expansions: HeadMatrices | None,
        value_dim: int,
        output: Linear,
        rotation: int,
        num_heads: int,
        rope_dim: int,
        rank: int,
        is_interleaved: bool,
    ) -> None:
        self.layer = layer
        self._down = down
        self._query = query
        self._query_norm = query_norm
        self._query_rank = query_rank
        self._norm = norm
        self._key_matrices = key_matrices
        self._value_matrices = value_matrices
        self._key_expansions = key_expansions
        self._value_dim = value_dim
        self._output = output
        self._rotation = rotation
        self._num_heads = num_heads
        self._rope_dim = rope_dim
        self._rank = rank
        self._is_interleaved = is_interleaved

    def __call__(self, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self._output(self._mixed(rows, step), step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self._output.add_to(residual, self._mixed(rows, step), step)

    def _mixed(self, rows: torch.Tensor, step: StepContext) -> torch.Tensor:
        num_tokens, num_heads, rope_dim = rows.shape[0], self._num_heads, self._rope_dim
        made = self._down(rows, step)
        kept = made[:, self._query_rank :]
        if self._query_norm is not None:
            rows = self._query_norm(made[:, : self._query_rank].contiguous())
        queries = self._query(rows, step).view(num_tokens, num_heads, -1)
        heads = made.new_empty(num_tokens, num_heads + 1, rope_dim + self._rank)
        self._place(heads[:, :num_heads, :rope_dim], queries[..., -rope_dim:])
        self._place(heads[:, num_heads, :rope_dim], kept[:, self._rank :])
        heads[:, num_heads, rope_dim:] = self._norm(kept[:, : self._rank].contiguous())
        attention, rotation = step.attention, step.rotations[self._rotation]
        if self._key_expansions is not None and isinstance(attention, CpuAttention) and step.inputs.prefills:
            return self._mixed_in_part(attention, self._key_expansions, heads, queries, rotation, step.inputs)
        heads[:, :num_heads, rope_dim:] = self._key_matrices(queries[..., :-rope_dim])
        mixed = attention.rope_and_attend(self.layer, heads, rotation, step.inputs)
        return self._value_matrices(mixed.view(num_tokens, num_heads, self._rank)).flatten(1)

    def _mixed_in_part(
        self,
        attention: CpuAttention,
        key_expansions: HeadMatrices,
        heads: torch.Tensor,
        queries: torch.Tensor,
        rotation: Rotation,
        inputs: CpuInputs,
    ) -> torch.Tensor:
        """Of a step with long chunks, whose keys and values are expanded; other rows attend as in `_mixed`."""
        num_tokens, num_heads, rope_dim = heads.shape[0], self._num_heads, self._rope_dim
        chunks = attention.long_chunks(inputs)
        ends = [0, *(place for chunk in chunks for place in (chunk.start, chunk.stop)), num_tokens]
        others = [slice(*pair) for pair in zip(ends[::2], ends[1::2], strict=True) if pair[0] < pair[1]]
        for rows in others:
            heads[rows, :num_heads, rope_dim:] = self._key_matrices(queries[rows, :, :-rope_dim])
        mixed = attention.rope_and_attend(self.layer, heads, rotation, inputs, leaves_long=True)
        values = heads.new_empty(num_tokens, num_heads, self._value_dim)
        for rows in others:
            values[rows] = self._value_matrices(mixed[rows].view(-1, num_heads, self._rank))
        for chunk in chunks:
            own = slice(chunk.start, chunk.stop)
            kept = attention.kept(self.layer, heads, chunk)
            width = queries.shape[-1]
            keys = kept.new_empty(len(kept), num_heads, width)
            keys[..., :rope_dim] = kept[:, None, :rope_dim]
            latents = kept[:, rope_dim:].contiguous()
            key_expansions.spread(latents, keys[..., rope_dim:])
            # As wide as keys, for SDPA has no fast way otherwise.
            expanded = kept.new_zeros(len(kept), num_heads, max(width, self._value_dim))
            self._value_matrices.spread(latents, expanded[..., : self._value_dim])
            asked = torch.cat((heads[own, :num_heads, :rope_dim], queries[own, :, :-rope_dim]), dim=-1)
            values[own] = attention.attend_long(asked, keys, expanded, chunk)[..., : self._value_dim]
        return values.flatten(1)

    def _place(self, target: torch.Tensor, turned: torch.Tensor) -> None:
        """What is to be rotated, in the order in which halves make pairs."""
        if not self._is_interleaved:
            target.copy_(turned)
            return
        half = self._rope_dim // 2
        target[..., :half] = turned[..., 0::2]
        target[..., half:] = turned[..., 1::2]
