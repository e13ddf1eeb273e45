"""From the neutral description of a weight to what the kernels in C multiply; nothing is rounded on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType

import torch
import torch.nn.functional as F

from ..models.packed_matrix import Form, PackedMatrix, pack_codes, padded_width
from .quantized_weight import QuantizedWeight

# The number of float inputs that the kernels add up before they scale the sum.
_LARGEST_FLOAT_GROUP = 256
_SMALLEST_CODE_GROUP = 16
_CODES5_GROUP = 32
# The kernels multiply a zero of all codes by the sum of 32 codes of a row, in 32 bits.
_LARGEST_ZERO = 1 << 15
# Of integers above 127 in 8 bits: the kernels multiply signed ones.
_MIDDLE = 128


def pack(weight: QuantizedWeight, kernels: ModuleType) -> PackedMatrix | None:
    """None for a weight in a manner that the kernels do not know."""
    form = _form(weight)
    if form is None or weight.num_outputs == 0 or weight.num_inputs == 0:
        return None
    if weight.codes.dtype is torch.int8 and form is Form.CODES4:
        weight = _moved(weight, 8)
    elif weight.codes.dtype is torch.uint8 and form is Form.CODES8 and weight.bits == 8:
        weight = _moved(weight, -_MIDDLE)
    lanes = kernels.lanes()
    num_groups, width = weight.scales.shape[1], padded_width(weight.num_inputs, form)
    # Inputs that are padded may begin another group, of which all is zero.
    num_padded = num_groups if num_groups == 1 else -(-width // weight.group)

    zeros = weight.zeros
    has_one_zero = zeros is not None and bool(zeros.min() == zeros.max()) and abs(int(zeros[0, 0])) <= _LARGEST_ZERO

    def grouped(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else _blocked(narrowed(values), num_padded, lanes)

    def groups_of_each(factors: torch.Tensor | None) -> int:
        return 1 if factors is None else num_groups // factors.shape[1]

    def factors(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return _blocked(narrowed(values), -(-num_padded // groups_of_each(values)), lanes)

    return PackedMatrix(
        kernels=kernels,
        form=form,
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        width=width,
        codes=pack_codes(weight.codes, form, kernels),
        group=weight.group,
        scales=grouped(weight.scales),
        zeros=int(zeros[0, 0]) if zeros is not None and has_one_zero else grouped(zeros),
        mins=grouped(weight.mins),
        scale_factors=factors(weight.scale_factors),
        min_factors=factors(weight.min_factors),
        scale_each=groups_of_each(weight.scale_factors),
        min_each=groups_of_each(weight.min_factors),
        table=None if weight.table is None else weight.table.contiguous(),
        order=None if weight.order is None else weight.order.to(torch.int64).contiguous(),
    )


def join_packed(parts: Iterable[PackedMatrix | None], num_outputs: int) -> PackedMatrix | None:
    """A matrix whose outputs come in parts, of which none is kept: all but the last are whole blocks.

    Parts differ in nothing but the datatypes of their scales, and in whether all zeros, of 8 bits, are the same. None
    if one is None.
    """
    whole: PackedMatrix | None = None
    first = 0
    for packed in parts:
        if packed is None or packed.num_outputs == num_outputs:
            return packed
        whole = _alike(packed.stretched(num_outputs) if whole is None else whole, packed)
        stop = first + packed.codes.shape[0]
        for name, values in whole.by_outputs.items():
            values[first:stop] = getattr(packed, name)
        first = stop
    return whole


def _alike(whole: PackedMatrix, part: PackedMatrix) -> PackedMatrix:
    """`whole`, in datatypes that hold the values of a part too."""
    widened: dict[str, torch.Tensor] = {}
    for name in ("scales", "mins"):
        own, its = getattr(whole, name), getattr(part, name)
        if own is not None and own.dtype is not its.dtype:
            widened[name] = own.float()
    zeros = part.zeros
    if isinstance(whole.zeros, int) and not (isinstance(zeros, int) and zeros == whole.zeros):
        assert whole.scales is not None, "codes have scales"
        widened["zeros"] = torch.full(whole.scales.shape, whole.zeros, dtype=torch.uint8)
    return replace(whole, **widened) if widened else whole


def _form(weight: QuantizedWeight) -> Form | None:
    has_one_group = weight.scales.shape[1] == 1
    if weight.codes.dtype is torch.float8_e4m3fn:
        is_known = weight.zeros is None and weight.mins is None and weight.order is None
        is_known &= has_one_group or (weight.group % 2 == 0 and weight.group <= _LARGEST_FLOAT_GROUP)
        is_number = (weight.codes.view(torch.uint8) & 0x7F) != 0x7F
        return Form.FLOAT8 if is_known and bool(is_number.all()) else None
    if not has_one_group and weight.group % _SMALLEST_CODE_GROUP:
        return None
    if weight.table is not None:
        return Form.TABLE4
    if weight.codes.dtype is torch.int8:
        return Form.CODES4 if weight.bits <= 4 and weight.codes.min() >= -8 and weight.codes.max() <= 7 else Form.CODES8
    if weight.bits <= 4:
        return Form.CODES4
    if weight.bits == 5 and (has_one_group or weight.group % _CODES5_GROUP == 0):
        return Form.CODES5
    return Form.CODES6 if weight.bits <= 6 else Form.CODES8


def _moved(weight: QuantizedWeight, step: int) -> QuantizedWeight:
    """The same with codes that are higher by `step`, and zeros too."""
    zeros = torch.zeros(weight.scales.shape, dtype=torch.int32) if weight.zeros is None else weight.zeros.int()
    # The sums of codes are at most 8 bits wide, so they may pass through the other sign.
    codes = (weight.codes + step).view(torch.uint8) if step > 0 else (weight.codes ^ _MIDDLE).view(torch.int8)
    return replace(weight, codes=codes, zeros=zeros + step)


def narrowed(values: torch.Tensor) -> torch.Tensor:
    """In the fewest bits that hold all values exactly."""
    is_integer = not values.dtype.is_floating_point
    candidates = (torch.uint8, torch.int8) if is_integer else (torch.float16, torch.bfloat16)
    if values.dtype in candidates:
        return values
    exact = values.float()
    for dtype in candidates:
        if is_integer:
            limits = torch.iinfo(dtype)
            is_same = bool(exact.min() >= limits.min and exact.max() <= limits.max)
        else:
            is_same = torch.equal(values.to(dtype).float(), exact)
        if is_same:
            return values.to(dtype)
    return exact


def _blocked(values: torch.Tensor, num_groups: int, lanes: int) -> torch.Tensor:
    """[outputs, groups] -> [blocks, groups, lanes]"""
    padded = F.pad(values, (0, num_groups - values.shape[1], 0, -values.shape[0] % lanes))
    return padded.unflatten(0, (-1, lanes)).transpose(1, 2).contiguous()
