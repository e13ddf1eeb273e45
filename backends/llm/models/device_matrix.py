"""Matrices in the form that the kernels for GPUs multiply by (`triton_linear`), in few bits or in floats."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F

# Inputs whose codes of 4 bits are the low halves of as many bytes; the high halves are those of the inputs after them.
HALF = 64


class DeviceForm(enum.Enum):
    """The form of a matrix's codes."""

    FLOATS = 0  # as they are
    CODES8 = 1  # uint8 or int8
    FLOAT8 = 2  # the bits of float8_e4m3fn
    # Two codes to a byte.
    CODES4 = 3  # 0 to 15
    TABLE4 = 4  # 0 to 15, for which a table has values in int8
    FLOAT4 = 5  # 0 to 15: the bits of e2m1, whose values are half of what the table has

    @property
    def is_halved(self) -> bool:
        return self.value >= DeviceForm.CODES4.value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMatrix:
    """A matrix [outputs, inputs] on a GPU; several of one form, those of experts, have their outputs one after another.

    `codes` [outputs, bytes or floats], padded to whole steps. `group` inputs share a scale; 0: all of them.
    `scales`, `zeros`, `mins` [outputs, groups] and the factors of these [outputs, n] mean what they do in
    QuantizedWeight. `zero`: that of all weights, if `zeros` is None; only integer codes have zeros. `table`: 16 values
    in int8, in two words of int64. `order` [inputs]: column i of the codes is that of input `order[i]`.
    `num_processors`: of the device.
    """

    form: DeviceForm
    num_inputs: int
    codes: torch.Tensor
    num_processors: int
    group: int = 0
    scales: torch.Tensor | None = None
    scale_factors: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    zero: int = 0
    mins: torch.Tensor | None = None
    min_factors: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return int(self.codes.shape[0])

    @property
    def num_groups(self) -> int:
        return 1 if self.scales is None else int(self.scales.shape[1])

    @property
    def num_bytes(self) -> int:
        tensors = (getattr(self, each.name) for each in fields(self))
        return sum(int(each.nbytes) for each in tensors if isinstance(each, torch.Tensor))

    @property
    def step_bytes(self) -> int:
        """How many codes of an output, in bytes or floats, a step of the kernels takes."""
        return step_of(self.form)

    def groups_of_each(self, factors: torch.Tensor | None) -> int:
        """How many groups share one of the factors; 0 if there are none."""
        return 0 if factors is None else self.num_groups // int(factors.shape[1])

    @classmethod
    def joined(cls, matrices: Sequence[Self]) -> Self | None:
        """The outputs of all, one after another; None unless all are of one form and shape."""
        first = matrices[0]
        for name in ("form", "num_inputs", "num_outputs", "group", "zero"):
            if any(getattr(each, name) != getattr(first, name) for each in matrices):
                return None
        parts: dict[str, torch.Tensor] = {}
        for name in ("codes", "scales", "scale_factors", "zeros", "mins", "min_factors"):
            tensors = [tensor for each in matrices if (tensor := getattr(each, name)) is not None]
            if tensors and (len(tensors) != len(matrices) or len({(each.dtype, each.shape) for each in tensors}) != 1):
                return None
            if tensors:
                parts[name] = torch.cat(tensors)
        for name in ("table", "order"):
            shared = getattr(first, name)
            for each in matrices:
                own = getattr(each, name)
                if (own is None) != (shared is None) or (own is not None and not torch.equal(own, shared)):
                    return None
        return replace(first, **parts)

    def dequantized(self, outputs: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """float32 [outputs, inputs], with the inputs in the order of the codes: what the kernels compute."""
        values = self._values(self.codes[outputs])
        if self.scales is None:
            return values
        values -= self.zero if self.zeros is None else self._of_inputs(self.zeros, None, outputs)
        values *= self._of_inputs(self.scales, self.scale_factors, outputs)
        return values if self.mins is None else values.sub_(self._of_inputs(self.mins, self.min_factors, outputs))

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.form.is_halved:
            halves = codes.unflatten(1, (-1, HALF))
            codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
        codes = codes[:, : self.num_inputs]
        if self.form is DeviceForm.FLOAT8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.table is not None:
            return self.table.view(torch.int8)[codes.long()].float()
        return codes.float()

    def _of_inputs(
        self, values: torch.Tensor, factors: torch.Tensor | None, outputs: slice | torch.Tensor
    ) -> torch.Tensor:
        values = values[outputs].float()
        if factors is not None:
            values = values * factors[outputs].float().repeat_interleave(self.groups_of_each(factors), dim=1)
        return values.repeat_interleave(self.group or self.num_inputs, dim=1)[:, : self.num_inputs]


def float_matrix(weight: torch.Tensor, num_processors: int) -> DeviceMatrix:
    """Of [outputs, inputs] in floats."""
    codes = pack_codes(weight, DeviceForm.FLOATS)
    return DeviceMatrix(form=DeviceForm.FLOATS, num_inputs=weight.shape[1], codes=codes, num_processors=num_processors)


def step_of(form: DeviceForm) -> int:
    return HALF if form.is_halved or form is DeviceForm.FLOATS else 2 * HALF


def pack_codes(codes: torch.Tensor, form: DeviceForm) -> torch.Tensor:
    """[outputs, inputs], one code or float each -> what lies in memory."""
    step = 2 * HALF if form.is_halved else step_of(form)
    codes = F.pad(codes, (0, -codes.shape[1] % step))
    if not form.is_halved:
        return codes.contiguous()
    halves = codes.unflatten(1, (-1, 2, HALF))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()
