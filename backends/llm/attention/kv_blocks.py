"""The memory of the paged KV cache, and the layout of a token's keys and values in each layer.

A block holds some tokens of one sequence in all layers. Memory is [blocks, layers, bytes of a layer] for each group of
layers: what a block has in the layers of a group is one piece, so that a block can be copied to a host at once. An
implementation of attention steps from block to block of a layer by a stride, which costs it nothing: within a block a
layer's keys and values lie as close together as they would in a tensor of its own.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace

import torch

from modelserver.backend import UnsupportedError

_SCALE_BYTES = 4
# So that nothing is divided by zero: of a head whose values are all zero.
_LEAST_SCALE = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that keep alike of a token: keys and values of `num_heads` heads, of `key_width` and `value_width` values.

    `value_width` 0: the values are the last `shared_width` values of the keys, as latent attention has them. `dtype` is
    that of storage; `num_scales` are kept in float32 for each head of a token, where `dtype` has 8 bits: one of its
    keys and one of its values. `source`: the dtype of what comes to be kept, where that is not `dtype`.
    """

    layers: tuple[int, ...]
    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    num_scales: int = 0
    source: torch.dtype | None = None
    shared_width: int = 0

    @property
    def num_parts(self) -> int:
        """Vectors that a token keeps of a head: its keys, and its values unless they are a part of the keys."""
        return 2 if self.value_width else 1

    @property
    def output_width(self) -> int:
        """Of what a query head gets: as wide as values."""
        return self.value_width or self.shared_width

    def values_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Of keys [..., key_width] the values that they contain: a view."""
        return keys[..., self.key_width - self.shared_width :]

    @property
    def heads_dtype(self) -> torch.dtype:
        """In which keys and values come, and in which the network computes."""
        return self.source or self.dtype

    def layer_bytes(self, block_size: int) -> int:
        """Of one block in one layer."""
        item: int = self.dtype.itemsize
        per_head = (self.key_width + self.value_width) * item + self.num_scales * _SCALE_BYTES
        return block_size * self.num_heads * per_head

    def block_bytes(self, block_size: int) -> int:
        """Of one block in all layers of the group."""
        return len(self.layers) * self.layer_bytes(block_size)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Of all layers that keep keys and values, in groups. One table of blocks serves all groups."""

    groups: tuple[KvGroup, ...]

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvLayout:
        """All layers alike, with keys and values of one width."""
        layers = tuple(range(num_layers))
        return cls(
            (KvGroup(layers=layers, num_heads=num_kv_heads, key_width=head_dim, value_width=head_dim, dtype=dtype),)
        )

    @property
    def dtype(self) -> torch.dtype:
        """That of the first group's storage."""
        return self.groups[0].dtype

    @property
    def group(self) -> KvGroup:
        """The only group. Its keys and values are of one width, with a scale for each or none; or one head's keys
        contain its values.

        UnsupportedError for a layout that no implementation of attention reads yet.
        """
        group = self.groups[0]
        is_latent = not group.value_width and group.num_heads == 1 and 0 < group.shared_width <= group.key_width
        is_pair = group.value_width == group.key_width and group.num_scales in (0, 2)
        if len(self.groups) > 1 or not (is_pair or (is_latent and not group.num_scales)):
            raise UnsupportedError(
                "attention reads one group of layers, with keys and values of one width or values within the keys"
            )
        return group

    def coded(self, dtype: torch.dtype) -> KvLayout:
        """The same kept as codes of 8 bits: `dtype` is int8 or float8_e4m3fn.

        UnsupportedError for heads whose scales would not lie at addresses of floats, and for latent attention.
        """
        if any(not group.value_width for group in self.groups):
            raise UnsupportedError("kv_cache_dtype is not supported with latent attention: use auto")
        if any((group.key_width + group.value_width) % 4 for group in self.groups):
            raise UnsupportedError("kv_cache_dtype needs keys and values in heads of an even width: use auto")
        return KvLayout(
            tuple(replace(group, dtype=dtype, num_scales=2, source=group.heads_dtype) for group in self.groups)
        )

    def block_bytes(self, block_size: int) -> int:
        """Of one block over all groups."""
        return sum(group.block_bytes(block_size) for group in self.groups)


class KvBlocks:
    """`num_blocks` blocks of `block_size` tokens.

    Memory is zeroed, never uninitialised: padding reads it, and a NaN would outlive its mask. On a CPU the system
    zeroes each page when it is first used, so that blocks take no memory before.
    """

    def __init__(self, layout: KvLayout, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._memory = [
            _zeros((num_blocks, len(group.layers), group.layer_bytes(block_size)), device) for group in layout.groups
        ]

    def pieces(self, block: int) -> list[torch.Tensor]:
        """All that a block holds: for each group one piece of memory, as bytes [layers, bytes of a layer]."""
        return [memory[block] for memory in self._memory]

    @property
    def pages(self) -> torch.Tensor:
        """Of `layout.group`, rows of one head's keys or values: [blocks * layers * parts * heads, block_size * width].

        Codes come as bytes, with the scales of a page behind them: `read_pages` and `write_pages` know where.
        """
        group = self.layout.group
        dtype = torch.uint8 if group.num_scales else group.dtype
        row = self.block_size * (group.key_width + (_SCALE_BYTES if group.num_scales else 0))
        return self._memory[0].view(-1).view(dtype).view(-1, row)

    @property
    def layers(self) -> list[torch.Tensor]:
        """Of `layout.group`, each layer's [blocks, block_size, parts, heads, width]: a token's keys beside its values.

        A layer's blocks do not follow each other: there is a stride between them. Inside, a block has no gaps.
        """
        group = self.layout.group
        shape = (self.num_blocks, self.block_size, group.num_parts, group.num_heads, group.key_width)
        values = self._memory[0].view(group.dtype)[..., : math.prod(shape[1:])]
        return [values[:, place].view(shape) for place in range(len(group.layers))]

    @property
    def scales(self) -> list[torch.Tensor]:
        """Of codes in `layers`: each layer's [blocks, block_size, 2, heads] in float32, behind the codes of a block."""
        group = self.layout.group
        shape = (self.num_blocks, self.block_size, 2, group.num_heads)
        floats = self._memory[0].view(torch.float32)[..., -math.prod(shape[1:]) :]
        return [floats[:, place].view(shape) for place in range(len(group.layers))]


def encoded(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in `dtype`, and their scales in float32 [..., 1]: the greatest of a head's values has the greatest code.

    What the kernels write, bit for bit.
    """
    wide = values.float()
    greatest = 127.0 if dtype == torch.int8 else 448.0
    scales = (wide.abs().amax(dim=-1, keepdim=True) / greatest).clamp_min(_LEAST_SCALE)
    parts = wide / scales
    return (parts.round() if dtype == torch.int8 else parts).to(dtype), scales


def decoded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of codes [..., width] in `dtype`; `scales` [..., 1]."""
    return (codes.float() * scales).to(dtype)


def write_pages(pages: torch.Tensor, cells: torch.Tensor, values: torch.Tensor, group: KvGroup) -> None:
    """Keep `values` [cells, width] as codes in `KvBlocks.pages`; cell i is token i % block_size of a page's."""
    block_size = pages.shape[1] // (group.key_width + _SCALE_BYTES)
    codes, scales = encoded(values, group.dtype)
    rows, offsets = cells // block_size, cells % block_size
    kept_codes, kept_scales = _parts_of(pages, group)
    kept_codes[rows, offsets] = codes.view(torch.uint8)
    kept_scales[rows, offsets] = scales


def read_pages(pages: torch.Tensor, group: KvGroup) -> torch.Tensor:
    """The values of rows of `KvBlocks.pages`: [pages, block_size * width] in the network's dtype."""
    codes, scales = _parts_of(pages, group)
    return decoded(codes.view(group.dtype), scales, group.heads_dtype).flatten(1)


def _parts_of(pages: torch.Tensor, group: KvGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Views: bytes [pages, block_size, width] and floats [pages, block_size, 1]."""
    size = pages.shape[1] // (group.key_width + _SCALE_BYTES) * group.key_width
    codes = pages[:, :size].unflatten(1, (-1, group.key_width))
    return codes, pages[:, size:].view(torch.float32)[..., None]


def _zeros(size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Bytes. `torch.zeros` would write to all of them."""
    if device.type != "cpu" or not math.prod(size):
        return torch.zeros(size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, math.prod(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(size)
