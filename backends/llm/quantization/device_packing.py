"""From the neutral description of a weight to what the kernels for GPUs multiply; nothing is rounded on the way."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..models.device_matrix import HALF, DeviceForm, DeviceMatrix, pack_codes, step_of
from .packing import narrowed
from .quantized_weight import QuantizedWeight
from .small_floats import e2m1_table

_SMALLEST_GROUP = 16


def pack_for_device(weight: QuantizedWeight, num_processors: int) -> DeviceMatrix | None:
    """None for a weight in a manner that the kernels do not know."""
    form = _form(weight)
    group = 0 if weight.scales.shape[1] == 1 else weight.group
    if form is None or weight.num_outputs == 0 or weight.num_inputs == 0 or not _is_whole(group, form):
        return None
    if weight.codes.dtype is torch.int8 and form is DeviceForm.CODES4:
        zeros = torch.zeros_like(weight.scales, dtype=torch.int32) if weight.zeros is None else weight.zeros.int()
        weight = replace(weight, codes=(weight.codes + 8).view(torch.uint8), zeros=zeros + 8)
    zero, zeros = 0, weight.zeros
    if zeros is not None and bool(zeros.min() == zeros.max()):
        zero, zeros = int(zeros[0, 0]), None
    if form is DeviceForm.FLOAT8:
        weight = replace(weight, codes=weight.codes.view(torch.uint8))
    return DeviceMatrix(
        form=form,
        num_inputs=weight.num_inputs,
        num_processors=num_processors,
        codes=pack_codes(weight.codes, form),
        group=group,
        scales=_narrowed(weight.scales),
        scale_factors=_narrowed(weight.scale_factors),
        zeros=_narrowed(zeros),
        zero=zero,
        mins=_narrowed(weight.mins),
        min_factors=_narrowed(weight.min_factors),
        table=None if weight.table is None else weight.table.to(weight.device).contiguous().view(torch.int64),
        order=None if weight.order is None else weight.order.to(torch.int64).contiguous(),
    )


def _form(weight: QuantizedWeight) -> DeviceForm | None:
    if weight.codes.dtype is torch.float8_e4m3fn:
        if weight.zeros is not None:
            return None
        is_number = (weight.codes.view(torch.uint8) & 0x7F) != 0x7F
        return DeviceForm.FLOAT8 if bool(is_number.all()) else None
    if weight.table is not None:
        is_known = torch.equal(weight.table.cpu(), e2m1_table())
        return None if weight.zeros is not None else DeviceForm.FLOAT4 if is_known else DeviceForm.TABLE4
    is_small = weight.bits <= 4
    if weight.codes.dtype is torch.int8:
        is_small &= bool(weight.codes.min() >= -8 and weight.codes.max() <= 7)
    return DeviceForm.CODES4 if is_small else DeviceForm.CODES8


def _is_whole(group: int, form: DeviceForm) -> bool:
    """Whether a tile has whole groups, or a group whole tiles."""
    tile = HALF if form.is_halved else step_of(form)
    return group == 0 or group % tile == 0 or (group >= _SMALLEST_GROUP and tile % group == 0)


def _narrowed(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else narrowed(values).contiguous()
