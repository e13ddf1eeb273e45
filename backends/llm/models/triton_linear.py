"""Products with the weights of a `DeviceMatrix` in Triton. Its torch twin is `DeviceMatrix.dequantized`.

Weights are dequantized in registers, in tiles, and multiplied by tl.dot in the datatype of the rows, with sums in
float32. A program has some outputs, some rows of one expert, and a part of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .device_matrix import DeviceForm, DeviceMatrix

_FLOATS = tl.constexpr(DeviceForm.FLOATS.value)
_CODES4 = tl.constexpr(DeviceForm.CODES4.value)  # from here on, two codes to a byte
_TABLE4 = tl.constexpr(DeviceForm.TABLE4.value)
_FLOAT4 = tl.constexpr(DeviceForm.FLOAT4.value)
_FLOAT8 = tl.constexpr(DeviceForm.FLOAT8.value)
# The bits of 2**23 + 128 in float32. Small integers added to them are added to the number: a conversion of an integer
# would take a GPU four times as long.
_MIDDLE_BITS = tl.constexpr(0x4B000080)
_MIDDLE = tl.constexpr(8388736.0)
# The fewest rows of a tile that tl.dot multiplies.
_LEAST_ROWS = 16
_MOST_ROWS = 128
# Programs for each processor that are wanted in flight, and the fewest steps along the inputs that one has.
_PROGRAMS_EACH = 4
_LEAST_STEPS = 4


@triton.jit
def _of_groups(values, factors, outputs, groups, is_group, num_groups, each: tl.constexpr):
    """float32 [outputs, groups] of grouped values, times their factors where `each` groups share one."""
    found = tl.load(values + outputs[:, None] * num_groups + groups[None, :], mask=is_group, other=0).to(tl.float32)
    if each > 0:
        place = outputs[:, None] * (num_groups // each) + groups[None, :] // each
        found *= tl.load(factors + place, mask=is_group, other=0).to(tl.float32)
    return found


@triton.jit
def _weights(
    codes, first, outputs, is_output, num_groups, scales, scale_factors, zeros, mins, min_factors, table,
    form: tl.constexpr, group: tl.constexpr, zero: tl.constexpr, scale_each: tl.constexpr, min_each: tl.constexpr,
    has_zeros: tl.constexpr, has_mins: tl.constexpr, count: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The weights of codes [count, width] of inputs from `first` on, in `dtype`."""
    if form == _FLOATS:
        return codes.to(dtype)
    wide = codes.to(tl.int32)
    unit: tl.constexpr = 256.0 if form == _FLOAT8 else 32768.0 if form == _FLOAT4 else 1.0
    if form == _TABLE4:
        word = tl.where(wide < 8, tl.load(table), tl.load(table + 1))
        values = (word >> ((wide & 7).to(tl.int64) * 8)).to(tl.int8).to(tl.float32)
    elif form == _FLOAT8:
        # As the bits of a half, which has a longer exponent, it is a 256th.
        values = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif form == _FLOAT4:
        # The table's values are twice those of e2m1, which as the bits of a half are a 2**14th.
        values = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = (wide + _MIDDLE_BITS).to(tl.float32, bitcast=True) - (_MIDDLE + zero)
    # How many groups a tile has: 1 where a group is not shorter than the tile, or all inputs are one.
    num: tl.constexpr = 1 if group == 0 or group >= width else width // group
    groups = tl.arange(0, num) if group == 0 else first // group + tl.arange(0, num)
    is_group = is_output[:, None] & (groups < num_groups)[None, :]
    values = tl.reshape(values, [count, num, width // num])
    if has_zeros:
        values -= _of_groups(zeros, zeros, outputs, groups, is_group, num_groups, 0)[:, :, None]
    scale = _of_groups(scales, scale_factors, outputs, groups, is_group, num_groups, scale_each) * unit
    values *= scale[:, :, None]
    if has_mins:
        values -= _of_groups(mins, min_factors, outputs, groups, is_group, num_groups, min_each)[:, :, None]
    return tl.reshape(values, [count, width]).to(dtype)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _multiply(
    rows, codes, scales, scale_factors, zeros, mins, min_factors, table, counts, bias, output,
    num_rows, num_experts, num_outputs, num_inputs, num_codes, num_groups, stride_row, num_steps,
    form: tl.constexpr, group: tl.constexpr, zero: tl.constexpr, scale_each: tl.constexpr, min_each: tl.constexpr,
    has_zeros: tl.constexpr, has_mins: tl.constexpr, has_bias: tl.constexpr, is_added: tl.constexpr,
    is_split: tl.constexpr, padded_experts: tl.constexpr,
    tile_rows: tl.constexpr, tile_outputs: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Some rows of one expert by some of its outputs, over `num_steps` steps along the inputs.

    With `is_split`, sums go to `output` [splits, rows, outputs] in float32, and `_add_splits` does the rest.
    """
    tile, split = tl.program_id(1), tl.program_id(2)
    first_output, first_row, last_row = 0, tile * tile_rows, num_rows
    if padded_experts > 0:
        # Each expert's rows are whole tiles; the grid has as many tiles as there can be.
        experts = tl.arange(0, padded_experts)
        own = tl.load(counts + experts, mask=experts < num_experts, other=0).to(tl.int32)
        tiles = (own + tile_rows - 1) // tile_rows
        expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
        if expert >= num_experts:
            return
        before = experts < expert
        begin = tl.sum(tl.where(before, own, 0), 0)
        last_row = begin + tl.sum(tl.where(experts == expert, own, 0), 0)
        first_row = begin + (tile - tl.sum(tl.where(before, tiles, 0), 0)) * tile_rows
        first_output = expert * num_outputs
    row = first_row + tl.arange(0, tile_rows)
    column = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    is_row, is_output = row < last_row, column < num_outputs
    outputs = (first_output + column).to(tl.int64)
    places = tl.arange(0, width)
    dtype = rows.dtype.element_ty
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    last = tl.minimum((split + 1) * num_steps, tl.cdiv(num_codes, width))
    for step in range(split * num_steps, last):
        packed = tl.load(
            codes + outputs[:, None] * num_codes + step * width + places[None, :], mask=is_output[:, None], other=0
        )
        num_halves: tl.constexpr = 2 if form >= _CODES4 else 1
        for half in tl.static_range(num_halves):
            first = (step * num_halves + half) * width
            inputs = first + places
            row_values = tl.load(
                rows + row.to(tl.int64)[:, None] * stride_row + inputs[None, :],
                mask=is_row[:, None] & (inputs < num_inputs)[None, :],
                other=0.0,
            )
            own_codes = packed if num_halves == 1 else (packed >> (4 * half)) & 15
            weights = _weights(
                own_codes, first, outputs, is_output, num_groups,
                scales, scale_factors, zeros, mins, min_factors, table,
                form, group, zero, scale_each, min_each, has_zeros, has_mins, tile_outputs, width, dtype,
            )  # fmt: skip
            sums = tl.dot(row_values, tl.trans(weights), sums, input_precision="ieee")
    place = (split * num_rows + row).to(tl.int64)[:, None] * num_outputs + column[None, :]
    is_there = is_row[:, None] & is_output[None, :]
    if not is_split:
        if has_bias:
            sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if is_added:
            sums += tl.load(output + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(output + place, sums.to(output.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _add_splits(
    sums, bias, output, num_rows, num_outputs, num_splits,
    has_bias: tl.constexpr, is_added: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One row and some outputs: the sums of all splits, in their order."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    is_output = column < num_outputs
    total = tl.zeros([tile], tl.float32)
    for split in range(num_splits):
        total += tl.load(sums + (split * num_rows + row) * num_outputs + column, mask=is_output, other=0.0)
    place = output + row * num_outputs + column
    if has_bias:
        total += tl.load(bias + column, mask=is_output, other=0.0).to(tl.float32)
    if is_added:
        total += tl.load(place, mask=is_output, other=0.0).to(tl.float32)
    tl.store(place, total.to(output.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["first_output", "num_rows"])
def _expand(
    codes, scales, scale_factors, zeros, mins, min_factors, table, indices, output,
    first_output, num_rows, num_inputs, num_codes, num_groups,
    form: tl.constexpr, group: tl.constexpr, zero: tl.constexpr, scale_each: tl.constexpr, min_each: tl.constexpr,
    has_zeros: tl.constexpr, has_mins: tl.constexpr, has_indices: tl.constexpr,
    tile_outputs: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The weights of some outputs, and of a step along the inputs, in the datatype of `output` [outputs, inputs]."""
    row = tl.program_id(0).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
    is_output = row < num_rows
    outputs = tl.load(indices + row, mask=is_output, other=0).to(tl.int64) if has_indices else first_output + row
    step, places = tl.program_id(1), tl.arange(0, width)
    packed = tl.load(
        codes + outputs[:, None] * num_codes + step * width + places[None, :], mask=is_output[:, None], other=0
    )
    num_halves: tl.constexpr = 2 if form >= _CODES4 else 1
    for half in tl.static_range(num_halves):
        first = (step * num_halves + half) * width
        own_codes = packed if num_halves == 1 else (packed >> (4 * half)) & 15
        weights = _weights(
            own_codes, first, outputs, is_output, num_groups,
            scales, scale_factors, zeros, mins, min_factors, table,
            form, group, zero, scale_each, min_each, has_zeros, has_mins, tile_outputs, width,
            output.dtype.element_ty,
        )  # fmt: skip
        inputs = first + places
        is_there = is_output[:, None] & (inputs < num_inputs)[None, :]
        tl.store(output + row[:, None] * num_inputs + inputs[None, :], weights, mask=is_there)


@triton.jit
def _round_rows(
    rows, codes, scales, num_inputs, stride_row,
    padded_inputs: tl.constexpr,
):  # fmt: skip
    """One row, to codes in int8, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    inputs = tl.arange(0, padded_inputs)
    is_input = inputs < num_inputs
    values = tl.load(rows + row * stride_row + inputs, mask=is_input, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / 127.0
    tl.store(codes + row * num_inputs + inputs, tl.floor(values / scale + 0.5).to(tl.int8), mask=is_input)
    tl.store(scales + row, scale)


def multiply(
    matrix: DeviceMatrix, rows: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """rows [rows, inputs] W^T + bias, in their datatype; added to `residual`, in place, if there is one.

    A row's result does not depend on how many rows there are.
    """
    num_rows = rows.shape[0]
    output = rows.new_empty(num_rows, matrix.num_outputs) if residual is None else residual
    tile = tile_of(num_rows, matrix.num_outputs, rows.dtype)
    num_tiles = -(-matrix.num_outputs // tile.outputs)
    all_steps = matrix.codes.shape[1] // matrix.step_bytes
    wanted = -(-_PROGRAMS_EACH * matrix.num_processors // num_tiles)
    num_steps = max(_LEAST_STEPS, -(-all_steps // wanted))
    num_splits = -(-all_steps // num_steps)
    whole = {"has_bias": bias is not None, "is_added": residual is not None}
    sums = output if num_splits == 1 else rows.new_empty(num_splits, num_rows, matrix.num_outputs, dtype=torch.float32)
    _multiply[(num_tiles, -(-num_rows // tile.rows), num_splits)](
        rows, *_parts(matrix), matrix.codes, rows if bias is None else bias, sums,
        num_rows, 1, matrix.num_outputs, matrix.num_inputs, matrix.codes.shape[1], matrix.num_groups, rows.stride(0),
        num_steps, **_kind(matrix), **whole, is_split=num_splits > 1, padded_experts=0,
        tile_rows=tile.rows, tile_outputs=tile.outputs, width=matrix.step_bytes,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _add_splits[(-(-matrix.num_outputs // 1024), num_rows)](
            sums, rows if bias is None else bias, output, num_rows, matrix.num_outputs, num_splits,
            **whole, tile=1024, num_warps=4,
        )  # fmt: skip
    return output


def multiply_grouped(
    matrix: DeviceMatrix, rows: torch.Tensor, counts: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Rows sorted by expert, of which expert i has `counts[i]`, by its outputs -> [rows, outputs of an expert].

    `bias` [outputs of all experts].

    Nothing is read back: the grid has as many tiles as there can be, and those too many leave at once.
    """
    num_rows, num_experts = rows.shape[0], counts.shape[0]
    num_outputs = matrix.num_outputs // num_experts
    tile = tile_of(-(-num_rows // num_experts), num_outputs, rows.dtype)
    num_tiles = min(num_rows, num_experts + num_rows // tile.rows)
    output = rows.new_empty(num_rows, num_outputs)
    _multiply[(-(-num_outputs // tile.outputs), num_tiles, 1)](
        rows, *_parts(matrix), counts, rows if bias is None else bias, output,
        num_rows, num_experts, num_outputs, matrix.num_inputs, matrix.codes.shape[1], matrix.num_groups,
        rows.stride(0), matrix.codes.shape[1] // matrix.step_bytes,
        **_kind(matrix), has_bias=bias is not None, is_added=False, is_split=False,
        padded_experts=triton.next_power_of_2(num_experts),
        tile_rows=tile.rows, tile_outputs=tile.outputs, width=matrix.step_bytes,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return output


def expand(matrix: DeviceMatrix, outputs: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights of some outputs, [outputs, inputs], with the inputs in the order of the codes."""
    is_slice = isinstance(outputs, slice)
    count = outputs.stop - outputs.start if isinstance(outputs, slice) else outputs.shape[0]
    expanded = torch.empty(count, matrix.num_inputs, dtype=dtype, device=matrix.codes.device)
    tile_outputs = 16
    _expand[(-(-count // tile_outputs), matrix.codes.shape[1] // matrix.step_bytes)](
        *_parts(matrix), matrix.codes if is_slice else outputs, expanded,
        outputs.start if is_slice else 0, count, matrix.num_inputs, matrix.codes.shape[1], matrix.num_groups,
        **_kind(matrix), has_indices=not is_slice, tile_outputs=tile_outputs, width=matrix.step_bytes, num_warps=4,
    )  # fmt: skip
    return expanded


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, inputs] in int8, and scales [rows, 1] in float32."""
    num_rows, num_inputs = rows.shape
    codes = torch.empty(num_rows, num_inputs, dtype=torch.int8, device=rows.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=rows.device)
    _round_rows[(num_rows,)](
        rows, codes, scales, num_inputs, rows.stride(0),
        padded_inputs=triton.next_power_of_2(num_inputs), num_warps=4 if num_inputs <= 4096 else 8,
    )  # fmt: skip
    return codes, scales


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of `_multiply` has, and how it is compiled."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


def tile_of(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tile:
    """By the rows of an expert, or all of them. The shared memory of every tile is within the 99 KiB of small GPUs."""
    padded: int = triton.next_power_of_2(num_rows)
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, padded))
    if dtype is torch.float32:  # no tensor cores, and four times the registers
        return Tile(min(rows, 32), 16, num_warps=4, num_stages=2)
    outputs = 64 if num_outputs >= 4096 or rows > 32 else 32
    if rows == _MOST_ROWS:
        return Tile(rows, outputs, num_warps=8, num_stages=2)
    return Tile(rows, outputs, num_warps=4, num_stages=4 if rows <= 32 else 2)


def _parts(matrix: DeviceMatrix) -> Sequence[torch.Tensor]:
    """What kernels read of it; where it has none of them, anything."""
    parts = (matrix.scales, matrix.scale_factors, matrix.zeros, matrix.mins, matrix.min_factors, matrix.table)
    return [matrix.codes, *(matrix.codes if part is None else part for part in parts)]


def _kind(matrix: DeviceMatrix) -> dict[str, Any]:
    """Which kernel it is: a few for each format."""
    return {
        "form": matrix.form.value,
        "group": matrix.group,
        "zero": matrix.zero,
        "scale_each": matrix.groups_of_each(matrix.scale_factors),
        "min_each": matrix.groups_of_each(matrix.min_factors),
        "has_zeros": matrix.zeros is not None,
        "has_mins": matrix.mins is not None,
    }
