"""Weights in few bits as the kernels in C multiply them (`_packed_linear.c`), and the layers over them."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Self

import torch

from ..kernels import device_processors
from ..step_context import StepContext
from .linear import GroupedLinear, Linear, ListedLinears


class Form(enum.IntEnum):
    """The form of a matrix's `codes`. The numbers are those of `enum Form` in C."""

    CODES4 = 0  # 0 to 15
    TABLE4 = 1  # 0 to 15, for which a table has values in int8
    CODES8 = 2  # int8
    BF16 = 3
    F16 = 4
    FLOAT8 = 5  # float8_e4m3fn
    F32 = 6
    CODES5 = 7  # 0 to 31
    CODES6 = 8  # 0 to 63

    @property
    def is_float(self) -> bool:
        """Whether rows are multiplied in float32; those of the others are quantized to 8 bits."""
        return Form.BF16 <= self <= Form.F32

    @property
    def bits(self) -> int:
        """Of an input."""
        return _BITS[self]


_BITS = {
    Form.CODES4: 4,
    Form.TABLE4: 4,
    Form.CODES5: 5,
    Form.CODES6: 6,
    Form.CODES8: 8,
    Form.FLOAT8: 8,
    Form.BF16: 16,
    Form.F16: 16,
    Form.F32: 32,
}
_KINDS = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4, torch.int8: 5}
_FLOAT_FORMS = {torch.bfloat16: Form.BF16, torch.float16: Form.F16, torch.float32: Form.F32}
# Rows in floats come by two.
_FLOAT_STEP = 2
_CODE_STEP = 32
_CPU = torch.device("cpu")
# What kernels take for the address of zeros that are all the same number.
_CONSTANT = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMatrix:
    """A matrix [outputs, inputs] in blocks of `lanes` outputs, for the instructions that `kernels` have chosen.

    `codes` as `pack_codes` makes them, with inputs padded to `width`. `scales`, `zeros` and `mins`
    [blocks, groups, lanes] and factors of these [blocks, n, lanes] mean what they do in QuantizedWeight; all may be
    float32, float16, bfloat16, uint8 or int8. `zeros` may be one number for all. `order` [inputs] too. A factor serves
    `scale_each` or `min_each` groups.
    """

    kernels: ModuleType
    form: Form
    num_outputs: int
    num_inputs: int
    width: int
    codes: torch.Tensor
    group: int = 1
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | int | None = None
    mins: torch.Tensor | None = None
    scale_factors: torch.Tensor | None = None
    min_factors: torch.Tensor | None = None
    scale_each: int = 1
    min_each: int = 1
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    unit: int = field(init=False)
    description: bytes = field(init=False)

    def __post_init__(self) -> None:
        num_groups = 1 if self.scales is None else self.scales.shape[1]
        num_factors = [1 if each is None else each.shape[1] for each in (self.scale_factors, self.min_factors)]
        is_whole = num_groups == 1 or self.group % _CODE_STEP == 0
        unit = _CODE_STEP if is_whole and self.form is not Form.CODES6 else _CODE_STEP // 2
        object.__setattr__(self, "unit", unit)
        numbers = [self.form, self.kernels.lanes(), self.num_outputs, self.num_inputs, self.width]
        numbers += [unit, self.group, num_groups]
        for count, each in zip(num_factors, (self.scale_each, self.min_each), strict=True):
            numbers += [count, each]
        for values in (self.scales, self.zeros, self.mins, self.scale_factors, self.min_factors):
            if isinstance(values, int):
                numbers += [_CONSTANT, values]
            else:
                numbers += [_KINDS[None if values is None else values.dtype], _address(values)]
        numbers += [_address(self.codes), _address(self.table), _address(self.order)]
        object.__setattr__(self, "description", struct.pack(f"{len(numbers)}q", *numbers))

    @property
    def by_outputs(self) -> dict[str, torch.Tensor]:
        """What has blocks of outputs, by name."""
        names = ("codes", "scales", "zeros", "mins", "scale_factors", "min_factors")
        return {name: values for name in names if isinstance(values := getattr(self, name), torch.Tensor)}

    def stretched(self, num_outputs: int) -> Self:
        """A matrix of the same form with that number of outputs, which are still to be set."""
        lanes = self.kernels.lanes()
        stretched = {}
        for name, values in self.by_outputs.items():
            stretched[name] = values.new_empty(-(-num_outputs // lanes), *values.shape[1:])
            if num_outputs % lanes:
                stretched[name][-1] = 0
        return replace(self, num_outputs=num_outputs, **stretched)

    @property
    def num_bytes(self) -> int:
        values = (self.scales, self.zeros, self.mins, self.scale_factors, self.min_factors, self.order)
        return int(self.codes.nbytes) + sum(int(each.nbytes) for each in values if isinstance(each, torch.Tensor))

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        """float32 rows [rows, inputs] -> [rows, outputs]; in place of the residual, if there is one to add to."""
        output = rows.new_empty(rows.shape[0], self.num_outputs) if residual is None else residual
        self.multiply_into(output, 0, rows, bias, is_added=residual is not None)
        return output

    def multiply_into(
        self, output: torch.Tensor, first: int, rows: torch.Tensor, bias: torch.Tensor | None, *, is_added: bool
    ) -> None:
        """The same into columns `first` and those that follow of an output without gaps, or added to them."""
        _multiply(self, self.description, None, rows, output, first, bias, is_added=is_added)

    def expanded(self, outputs: torch.Tensor) -> torch.Tensor:
        """Some outputs' weights, exactly, in float32 [count, inputs]."""
        outputs = outputs.to(torch.int64).contiguous()
        rows = torch.empty(outputs.shape[0], self.num_inputs)
        self.kernels.expand(
            self.description, outputs.data_ptr(), outputs.shape[0], rows.data_ptr(), torch.get_num_threads()
        )
        return rows


def _multiply(
    matrix: PackedMatrix,
    descriptions: bytes,
    counts: torch.Tensor | None,
    rows: torch.Tensor,
    output: torch.Tensor,
    first: int,
    bias: torch.Tensor | None,
    *,
    is_added: bool,
) -> None:
    """Multiply by one matrix, or by several like `matrix`, of which each has `counts` of the rows in turn."""
    rows = rows.contiguous()
    num_rows, width = output.shape
    assert num_rows == rows.shape[0], f"an output of {num_rows} rows for {rows.shape[0]}"
    assert first + matrix.num_outputs <= width, "the output has fewer columns"
    if num_rows:
        matrix.kernels.multiply(
            descriptions,
            _address(counts),
            rows.data_ptr(),
            num_rows,
            output.data_ptr() + first * output.itemsize,
            width,
            _address(bias),
            is_added,
            torch.get_num_threads(),
        )


def pack_codes(codes: torch.Tensor, form: Form, kernels: ModuleType) -> torch.Tensor:
    """[outputs, inputs] -> what lies in memory, [blocks, ...], uint8.

    Each output of a block has four bytes of a step: two inputs of bfloat16, four codes of 8 bits, or eight of 4 bits,
    of which the first four are the low halves. The other floats have all outputs of one input, then of the next.
    Codes of 5 bits have steps of 32 inputs: 20 bytes with 20 codes, and those of the other 12 in the bits above.
    Codes of 6 bits have steps of 16 inputs: 12 bytes with 12 codes, and the other 4 in the bits above.
    """
    lanes, (num_outputs, num_inputs) = kernels.lanes(), codes.shape
    codes, width = codes if codes.stride(-1) == 1 else codes.contiguous(), padded_width(num_inputs, form)
    num_blocks, size = -(-num_outputs // lanes), codes.element_size()
    packed = torch.empty(num_blocks, width * lanes * form.bits // 8, dtype=torch.uint8)
    kernels.pack(
        form,
        lanes,
        width,
        num_inputs,
        codes.data_ptr(),
        codes.stride(0) * size,
        num_outputs,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return packed


def padded_width(num_inputs: int, form: Form) -> int:
    step = _FLOAT_STEP if form.is_float else _CODE_STEP
    return -(-num_inputs // step) * step


def pack_floats(weight: torch.Tensor, kernels: ModuleType) -> PackedMatrix:
    """Of a weight [outputs, inputs] in bfloat16, float16 or float32, as it is."""
    form = _FLOAT_FORMS[weight.dtype]
    num_outputs, num_inputs = weight.shape
    return PackedMatrix(
        kernels=kernels,
        form=form,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        width=padded_width(num_inputs, form),
        codes=pack_codes(weight, form, kernels),
    )


class PackedMatrixLinear:
    """On a CPU. Rows are of any float datatype, and the result of the same; a row's does not depend on the others."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None) -> None:
        self.matrix = matrix
        self.form = matrix.form.name
        self.num_bytes = matrix.num_bytes
        self.bias = None if bias is None else bias.float().contiguous()

    def __call__(self, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        if rows.dtype is torch.float32:  # asked here, since in a step of one row each call of torch counts
            return self.matrix.multiply(rows, self.bias, None)
        return self.matrix.multiply(rows.float(), self.bias, None).to(rows.dtype)

    def write_to(self, output: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """The result for rows of float32 into some columns of an output without gaps."""
        self.matrix.multiply_into(output, first, rows, self.bias, is_added=False)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        if residual.dtype is torch.float32 and residual.is_contiguous():
            return self.matrix.multiply(rows.float(), self.bias, residual)
        return residual.add_(self(rows, step))


class SideBySide:
    """Layers of the same rows in unlike forms; each writes into its columns of one result."""

    def __init__(self, linears: Sequence[PackedMatrixLinear]) -> None:
        self.linears = tuple(linears)
        self._width = sum(linear.matrix.num_outputs for linear in linears)
        self.form = " and ".join(dict.fromkeys(linear.form for linear in linears))
        self.num_bytes = sum(linear.num_bytes for linear in linears)

    def __call__(self, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        floats = rows.float()
        output = floats.new_empty(rows.shape[0], self._width)
        first = 0
        for linear in self.linears:
            linear.write_to(output, first, floats)
            first += linear.matrix.num_outputs
        return output.to(rows.dtype)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return residual.add_(self(rows, step))


class _PackedGroup:
    """One part of the layer of all experts: matrices of one shape and form, in one product."""

    def __init__(self, linears: Sequence[PackedMatrixLinear]) -> None:
        self._linears = tuple(linears)
        self._matrix = linears[0].matrix
        self._descriptions = b"".join(linear.matrix.description for linear in linears)
        self._bias: torch.Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            none = torch.zeros(self.num_outputs)
            self._bias = torch.stack([none if linear.bias is None else linear.bias for linear in linears])

    @property
    def num_outputs(self) -> int:
        return self._matrix.num_outputs

    def write_to(self, output: torch.Tensor, first: int, rows: torch.Tensor, counts: torch.Tensor) -> None:
        _multiply(self._matrix, self._descriptions, counts, rows, output, first, self._bias, is_added=False)


class PackedExperts:
    """The same layer of all experts, as one product for each of its parts. A row's result does not depend on others."""

    def __init__(self, experts: Sequence[Sequence[PackedMatrixLinear]]) -> None:
        """`experts`: the parts of each, which lie side by side."""
        self.experts = experts
        self._parts = [_PackedGroup(part) for part in zip(*experts, strict=True)]
        self._width = sum(part.num_outputs for part in self._parts)
        linears = [linear for parts in experts for linear in parts]
        self.form = " and ".join(dict.fromkeys(linear.form for linear in linears))
        self.num_bytes = sum(linear.num_bytes for linear in linears)

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        floats = rows.float()
        output = floats.new_empty(rows.shape[0], self._width)
        first = 0
        for part in self._parts:
            part.write_to(output, first, floats, counts)
            first += part.num_outputs
        return output.to(rows.dtype)


def grouped_linears(linears: Sequence[Linear], device: torch.device = _CPU) -> GroupedLinear:
    """Of the same layer of all experts: one product where all are packed alike, else each expert's own."""
    num_processors = device_processors(device)
    if num_processors is not None:
        from .device_linear import device_experts

        return device_experts(linears, num_processors) or ListedLinears(linears)
    experts = [_packed_parts(linear) for linear in linears]
    kinds = {
        tuple((part.matrix.form, part.matrix.unit, part.matrix.num_outputs, part.matrix.num_inputs) for part in parts)
        for parts in experts
    }
    return PackedExperts(experts) if len(kinds) == 1 and experts[0] else ListedLinears(linears)


def _packed_parts(linear: Linear) -> Sequence[PackedMatrixLinear]:
    if isinstance(linear, PackedMatrixLinear):
        return (linear,)
    return linear.linears if isinstance(linear, SideBySide) else ()


class PackedMatrixEmbedding:
    """The rows of the tokens that are asked for, of a matrix that the head may multiply by as well."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        self.matrix = matrix
        self._dtype = dtype
        self.form = matrix.form.name
        self.num_bytes = matrix.num_bytes

    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        return self.matrix.expanded(token_ids).to(self._dtype)

    def head(self) -> PackedMatrixLinear:
        """The layer of the same matrix, in the same memory."""
        return PackedMatrixLinear(self.matrix, None)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
