"""What adapters add to a layer in Triton, at addresses that never change: steps with adapters can be graphs.

Rows of one adapter lie side by side, and a program has some of them: nothing is gathered, and no row reads another's
adapter. `_shrink` multiplies them by the first matrix of their adapter, `_add_expanded` adds their product with the
second. The torch twin is `_AdaptedPart.add` of `layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .step import TILE_ROWS, RowTiles

# The fewest ranks and rows that tl.dot multiplies, and the most ranks of a tile.
_LEAST_RANK, _MOST_RANK = 16, 64
# Inputs of a step, in bytes.
_WIDTH_BYTES = 256
_TILE_OUTPUTS = 128
# Inputs that a program sums up at least, and parts that they are cut into at most: this depends on no batch, so that a
# row's result does not either.
_LEAST_INPUTS, _MOST_SPLITS = 512, 8


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tiles"])
def _shrink(
    rows, downs, ranks, tiles, narrow, num_rows, num_inputs, stride_row, num_parts, max_rank, num_steps,
    tile_rows: tl.constexpr, tile_ranks: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """narrow [splits, rows, parts * max_rank] in float32: some ranks of a part, over `num_steps` steps along inputs."""
    tile, split = tl.program_id(0), tl.program_id(2)
    slot = tl.load(tiles + 3 * tile)
    if slot < 0:
        return
    num_tiles = max_rank // tile_ranks
    part = tl.program_id(1) // num_tiles
    first_rank = (tl.program_id(1) % num_tiles) * tile_ranks
    rank = tl.load(ranks + slot * num_parts + part)
    if first_rank >= rank:
        return
    row = tl.load(tiles + 3 * tile + 1) + tl.arange(0, tile_rows)
    is_row = row < tl.load(tiles + 3 * tile + 2)
    own = first_rank + tl.arange(0, tile_ranks)
    row_start = rows + row.to(tl.int64)[:, None] * stride_row
    down_start = downs + ((slot.to(tl.int64) * num_parts + part) * max_rank + own)[:, None] * num_inputs
    sums = tl.zeros([tile_rows, tile_ranks], tl.float32)
    for step in range(split * num_steps, tl.minimum((split + 1) * num_steps, tl.cdiv(num_inputs, width))):
        inputs = step * width + tl.arange(0, width)
        is_input = (inputs < num_inputs)[None, :]
        values = tl.load(row_start + inputs[None, :], mask=is_row[:, None] & is_input, other=0.0)
        down = tl.load(down_start + inputs[None, :], mask=(own < rank)[:, None] & is_input, other=0.0)
        sums = tl.dot(values, tl.trans(down), sums, input_precision="ieee")
    place = (split * num_rows + row).to(tl.int64)[:, None] * (num_parts * max_rank) + part * max_rank + own[None, :]
    tl.store(narrow + place, sums, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tiles"])
def _add_expanded(
    narrow, ups, ranks, tiles, columns, output, num_rows, num_outputs, stride_output, num_parts, max_rank,
    num_splits, tile_rows: tl.constexpr, tile_ranks: tl.constexpr, tile_outputs: tl.constexpr,
):  # fmt: skip
    """Adds to some columns of one part of `output`."""
    tile = tl.program_id(0)
    slot = tl.load(tiles + 3 * tile)
    if slot < 0:
        return
    part = tl.load(columns + 3 * tl.program_id(1))
    rank = tl.load(ranks + slot * num_parts + part)
    if rank == 0:
        return
    row = tl.load(tiles + 3 * tile + 1) + tl.arange(0, tile_rows)
    is_row = row < tl.load(tiles + 3 * tile + 2)
    column = tl.load(columns + 3 * tl.program_id(1) + 1) + tl.arange(0, tile_outputs)
    is_column = column < tl.load(columns + 3 * tl.program_id(1) + 2)
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    for first_rank in range(0, rank, tile_ranks):
        own = first_rank + tl.arange(0, tile_ranks)
        is_rank = own < rank
        place = narrow + row.to(tl.int64)[:, None] * (num_parts * max_rank) + part * max_rank + own[None, :]
        values = tl.zeros([tile_rows, tile_ranks], tl.float32)
        for _ in range(num_splits):  # all at once would take more registers than there are
            values += tl.load(place, mask=is_row[:, None] & is_rank[None, :], other=0.0)
            place += num_rows.to(tl.int64) * (num_parts * max_rank)
        up = tl.load(
            ups + (slot.to(tl.int64) * num_outputs + column)[:, None] * max_rank + own[None, :],
            mask=is_column[:, None] & is_rank[None, :],
            other=0.0,
        )
        sums = tl.dot(values.to(up.dtype), tl.trans(up), sums, input_precision="ieee")
    target = output + row.to(tl.int64)[:, None] * stride_output + column[None, :]
    is_there = is_row[:, None] & is_column[None, :]
    sums += tl.load(target, mask=is_there, other=0.0).to(tl.float32)
    tl.store(target, sums.to(output.dtype.element_ty), mask=is_there)


class LayerSlots:
    """The matrices that each slot has of a layer, whose outputs are those of its parts, `widths`, side by side.

    `downs` [slots, parts, rank, inputs] and `ups` [slots, outputs, rank], of which `ranks` [slots, parts] are used.
    """

    def __init__(
        self,
        widths: Sequence[int],
        num_inputs: int,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rank = padded_rank(max_rank)
        self._firsts = [sum(widths[:part]) for part in range(len(widths))]
        self._widths = tuple(widths)
        self._downs = torch.zeros(num_slots, len(widths), rank, num_inputs, dtype=dtype, device=device)
        self._ups = torch.zeros(num_slots, sum(widths), rank, dtype=dtype, device=device)
        self._ranks = torch.zeros(num_slots, len(widths), dtype=torch.int32, device=device)
        columns = [
            (part, start, first + width)
            for part, (first, width) in enumerate(zip(self._firsts, widths, strict=True))
            for start in range(first, first + width, _TILE_OUTPUTS)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int32, device=device)
        self._num_splits = min(_MOST_SPLITS, max(1, num_inputs // _LEAST_INPUTS))

    def place(self, slot: int, part: int, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies matrices [rank, inputs] and [outputs, rank] into a slot. Returns them as they lie there."""
        rank, first = down.shape[0], self._firsts[part]
        own_down = self._downs[slot, part, :rank]
        own_up = self._ups[slot, first : first + self._widths[part], :rank]
        own_down.copy_(down)
        own_up.copy_(up)
        self._ranks[slot, part] = rank
        return own_down, own_up

    def clear(self, slot: int, part: int) -> None:
        """A slot has nothing of a part from now on."""
        self._ranks[slot, part] = 0

    def add(self, output: torch.Tensor, rows: torch.Tensor, tiles: RowTiles) -> None:
        """Add to `output` [rows, outputs] what the slots of the tiles give for `rows` [rows, inputs], all in one
        datatype. A row's result does not depend on the others.
        """
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        num_rows, num_inputs = rows.shape
        num_parts, max_rank = self._downs.shape[1:3]
        tile_ranks = min(max_rank, _MOST_RANK)
        narrow = rows.new_empty(self._num_splits, num_rows, num_parts * max_rank, dtype=torch.float32)
        num_tiles = tiles.table.shape[0]
        width = _WIDTH_BYTES // rows.dtype.itemsize
        num_steps = -(-num_inputs // (width * self._num_splits))
        _shrink[(num_tiles, num_parts * (max_rank // tile_ranks), self._num_splits)](
            rows, self._downs, self._ranks, tiles.table, narrow,
            num_rows, num_inputs, rows.stride(0), num_parts, max_rank, num_steps,
            tile_rows=tiles.num_rows, tile_ranks=tile_ranks, width=width,
            num_warps=2 if tile_ranks * tiles.num_rows <= 256 else 4,
            num_stages=4 if tiles.num_rows == TILE_ROWS else 2,
        )  # fmt: skip
        _add_expanded[(num_tiles, self._columns.shape[0])](
            narrow, self._ups, self._ranks, tiles.table, self._columns, output,
            num_rows, self._ups.shape[1], output.stride(0), num_parts, max_rank,
            self._num_splits, tile_rows=tiles.num_rows, tile_ranks=tile_ranks, tile_outputs=_TILE_OUTPUTS,
            num_warps=4 if tiles.num_rows == TILE_ROWS else 8, num_stages=1,
        )  # fmt: skip


def padded_rank(rank: int) -> int:
    """As many ranks as matrices of this rank take."""
    if rank > _MOST_RANK:
        return -(-rank // _MOST_RANK) * _MOST_RANK
    padded: int = triton.next_power_of_2(max(rank, _LEAST_RANK))
    return padded
