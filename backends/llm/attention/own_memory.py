"""Attention of one layer to texts whose keys and values lie in memory of their own, outside the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .kv_blocks import KvGroup
from .paged import Rotation

_LEAST_ROOM = 64


class TextMemory:
    """Keys and values of the tokens [first, end) of a text. Tokens are taken back by lowering `end`."""

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self._kept: torch.Tensor | None = None

    def extend(self, kv: torch.Tensor) -> torch.Tensor:
        """Keep those of further tokens [tokens, heads, width]; all that are kept, in order."""
        num_old = self.end - self.first
        self.end += len(kv)
        size = self.end - self.first
        if self._kept is None or len(self._kept) < size:
            grown = kv.new_empty(max(_LEAST_ROOM, 2 * size), *kv.shape[1:])
            if self._kept is not None:
                grown[:num_old] = self._kept[:num_old]
            self._kept = grown
        self._kept[num_old:size] = kv
        return self._kept[:size]


class OwnMemoryAttention:
    """Attends as a `PagedAttention` does, without windows and soft caps. What `group` says is kept of a token.

    The inputs of a step are the `TextMemory` of each text, and its number of rows, which follow the tokens that are
    kept of it.
    """

    def __init__(self, group: KvGroup, scale: float) -> None:
        self._group = group
        self._scale = scale

    def rope_and_attend(
        self,
        layer: int,  # noqa: ARG002 - there is one
        heads: torch.Tensor,
        rotation: Rotation | None,
        texts: Sequence[tuple[TextMemory, int]],
    ) -> torch.Tensor:
        """`heads` [tokens, heads + parts * kv heads, head_dim] -> [tokens, heads' outputs]."""
        group = self._group
        num_queries = heads.shape[1] - group.num_parts * group.num_heads
        if rotation is not None:
            rotation.apply_rope(heads[:, : num_queries + group.num_heads])
        parts = heads.split([num_rows for _, num_rows in texts])
        mixed = [self._attend(part, num_queries, memory) for part, (memory, _) in zip(parts, texts, strict=True)]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend(self, heads: torch.Tensor, num_queries: int, memory: TextMemory) -> torch.Tensor:
        group, num_rows = self._group, len(heads)
        kept = memory.extend(heads[:, num_queries:])
        keys = kept[:, : group.num_heads]
        values = group.values_of(keys) if group.num_parts == 1 else kept[:, group.num_heads :]
        mask = None
        if num_rows > 1:
            ones = torch.ones(num_rows, len(kept), dtype=torch.bool, device=heads.device)
            mask = ones.tril(len(kept) - num_rows)
        mixed = F.scaled_dot_product_attention(
            heads[:, :num_queries].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=self._scale,
            enable_gqa=num_queries != group.num_heads,
        )
        return mixed[0].transpose(0, 1).flatten(1)
