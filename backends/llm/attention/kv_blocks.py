"""The memory of the paged KV cache: for each layer one tensor of blocks."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer keeps of one token: keys and values of `num_kv_heads` heads of `head_dim`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Of one block over all layers."""
        return self.num_layers * self.layer_bytes(block_size)

    def layer_bytes(self, block_size: int) -> int:
        """Of one block in one layer."""
        item: int = self.dtype.itemsize
        return block_size * 2 * self.num_kv_heads * self.head_dim * item


class KvBlocks:
    """`layers[i]` is [num_blocks, block_size, 2, num_kv_heads, head_dim]: a token's keys, beside them its values.

    So a step stores both with one copy and a block is one piece of memory to gather. Memory is zeroed, never
    uninitialised: padding reads it, and a NaN would outlive its mask. On a CPU the system zeroes each page when it is
    first used, so that blocks take no memory before.
    """

    def __init__(self, shape: KvShape, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = (num_blocks, block_size, 2, shape.num_kv_heads, shape.head_dim)
        self.layers = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros` would write to all of it."""
    if device.type != "cpu" or not math.prod(size):
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(size)
