"""Linear layers over weights in few bits, in the form that the machine multiplies fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..kernels import device_processors, packed_kernels_for
from ..models.device_matrix import HALF, DeviceForm, DeviceMatrix, pack_codes, step_of
from ..models.linear import JoinedLinear, Linear, TokenEmbedding
from ..models.packed_matrix import PackedMatrix, PackedMatrixEmbedding, PackedMatrixLinear, SideBySide
from ..step_context import StepContext
from .packing import narrowed, pack
from .quantized_weight import QuantizedWeight
from .small_floats import e2m1_table


def quantized_linear(weight: QuantizedWeight | Sequence[QuantizedWeight], bias: torch.Tensor | None) -> Linear:
    """Of one weight, or of several whose outputs lie side by side; `bias` [all outputs] is in floats.

    Rows may be of any float datatype, and so is the result.
    """
    parts = [weight] if isinstance(weight, QuantizedWeight) else list(weight)
    joined = _joined(parts)
    lengths = [part.num_outputs for part in joined]
    biases = [None] * len(joined) if bias is None else bias.split(lengths)
    linears = [_linear(part, part_bias) for part, part_bias in zip(joined, biases, strict=True)]
    if len(linears) == 1:
        return linears[0]
    packed = [linear for linear in linears if isinstance(linear, PackedMatrixLinear)]
    return SideBySide(packed) if len(packed) == len(linears) else JoinedLinear(linears)


def packed_linear(matrices: Sequence[PackedMatrix], bias: torch.Tensor | None) -> Linear:
    """The same of matrices that are packed."""
    biases = [None] * len(matrices) if bias is None else bias.split([matrix.num_outputs for matrix in matrices])
    linears = [PackedMatrixLinear(matrix, part_bias) for matrix, part_bias in zip(matrices, biases, strict=True)]
    return linears[0] if len(linears) == 1 else SideBySide(linears)


def quantized_embedding(weight: QuantizedWeight, dtype: torch.dtype) -> TokenEmbedding:
    """Of the network's `dtype`; only the rows that are asked for are dequantized."""
    matrix = _packed(weight)
    if matrix is not None:
        return PackedMatrixEmbedding(matrix, dtype)
    on_device = _on_device(weight) if weight.order is None else None
    if on_device is None:
        return QuantizedEmbedding(weight, dtype)
    from ..models.device_linear import DeviceEmbedding

    return DeviceEmbedding(on_device, dtype)


class DequantizedLinear:
    """Any weight on any device: made into floats again for each product."""

    def __init__(self, weight: QuantizedWeight | _NibbleWeight, bias: torch.Tensor | None) -> None:
        self._weight = weight if isinstance(weight, _NibbleWeight) else _compact(weight)
        self.form, self.num_bytes = self._weight.form, self._weight.num_bytes
        self._bias = bias

    def __call__(self, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        bias = None if self._bias is None else self._bias.to(rows.dtype)
        return F.linear(rows, self._weight.dequantized().to(rows.dtype), bias)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return residual.add_(self(rows, step))


class QuantizedEmbedding:
    """Dequantizes the rows of the tokens that are asked for."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._weight = _compact(weight)
        self.form, self.num_bytes = self._weight.form, self._weight.num_bytes
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        return self._weight.rows(token_ids).dequantized().to(self._dtype)

    def head(self) -> Linear:
        """The layer of the same matrix, in the same memory."""
        return DequantizedLinear(self._weight, None)


class _NibbleWeight:
    """Codes of at most 4 bits, two in each byte: those of even inputs are the low halves."""

    def __init__(self, weight: QuantizedWeight) -> None:
        codes = F.pad(weight.codes, (0, weight.num_inputs % 2))
        self._num_inputs = weight.num_inputs
        self._halves = codes[:, ::2] | codes[:, 1::2] << 4
        # What is kept of the description has codes that take no memory.
        self._rest = replace(weight, codes=codes.new_zeros(1, 1).expand(weight.codes.shape))
        self.form = weight.form
        self.num_bytes = weight.num_bytes - weight.codes.nbytes + self._halves.nbytes

    def dequantized(self) -> torch.Tensor:
        return self.rows(slice(None)).dequantized()

    def rows(self, index: slice | torch.Tensor) -> QuantizedWeight:
        halves = self._halves[index]
        codes = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1)
        return replace(self._rest.rows(index), codes=codes[:, : self._num_inputs])


def _compact(weight: QuantizedWeight) -> QuantizedWeight | _NibbleWeight:
    return _NibbleWeight(weight) if weight.bits <= 4 and weight.codes.dtype is torch.uint8 else weight


def _joined(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Neighbours that are alike become one."""
    runs: list[list[QuantizedWeight]] = []
    for part in parts:
        if runs and runs[-1][0].is_like(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [QuantizedWeight.joined(run) for run in runs]


def _linear(weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
    matrix = _packed(weight)
    if matrix is not None:
        return PackedMatrixLinear(matrix, bias)
    on_device = _on_device(weight)
    if on_device is None:
        return DequantizedLinear(weight, bias)
    from ..models.device_linear import DeviceLinear

    return DeviceLinear(on_device, bias, weight.activations)


def _packed(weight: QuantizedWeight) -> PackedMatrix | None:
    kernels = packed_kernels_for(weight.device)
    return None if kernels is None else pack(weight, kernels)


def _on_device(weight: QuantizedWeight) -> DeviceMatrix | None:
    num_processors = device_processors(weight.device)
    return None if num_processors is None else pack_for_device(weight, num_processors)


# From the neutral description of a weight to what the kernels for GPUs multiply; nothing is rounded on the way.

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
