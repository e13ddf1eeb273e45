"""One matrix in few bits, as readers of weight formats hand it over: the same description for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# What runs along the outputs and, in groups, along the inputs.
_GRID = ("codes", "scales", "zeros", "mins", "scale_factors", "min_factors")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A matrix [outputs, inputs]. Tensors are on one device, with as few bits as the format has.

    `codes` [outputs, inputs], one in each byte: uint8 from 0 to 2**bits - 1, int8, or float8_e4m3fn.
    `group` inputs share a scale; the last group of a row may be shorter. `scales` [outputs, groups].

    A weight is `scale * (value - zero) - min`, where

    - `value` is the code, or `table[code]`: `table` has 16 values in int8, for codes of up to 4 bits.
    - `scale` is that of `scales` (any datatype), times its `scale_factors` [outputs, n], each of which serves
      groups / n groups in turn. Formats with scales of scales keep both in few bits so.
    - `zero` is of `zeros` [outputs, groups], integers; 0 without them.
    - `min` is of `mins` [outputs, groups], times `min_factors` as with the scales; 0 without them.

    All is computed in float32, from the left to the right, and rounded after each operation.

    `order` [inputs]: column i of `codes` is that of input `order[i]`; without it, of input i.

    `activations`: int8 or float8_e4m3fn where the checkpoint was made to be multiplied by rows in it, each with a scale
    of its own. Without it, rows stay in floats, or in as many bits as the layer deems enough.

    Raises InvalidArgumentError if the parts do not fit together.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    bits: int
    zeros: torch.Tensor | None = None
    mins: torch.Tensor | None = None
    scale_factors: torch.Tensor | None = None
    min_factors: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    activations: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.dtype not in _CODES:
            raise _wrong("codes", "a matrix of uint8, int8 or float8_e4m3fn", self.codes)
        if not 1 <= self.bits <= 8 or self.group < 1:
            raise InvalidArgumentError(f"weights of {self.bits} bits in groups of {self.group} are not supported")
        grid = (self.num_outputs, -(-self.num_inputs // self.group))
        for name in ("scales", "zeros", "mins"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != grid:
                raise _wrong(name, f"the shape {list(grid)}", tensor)
        if self.zeros is not None and self.zeros.dtype not in _INTEGERS:
            raise _wrong("zeros", "integers", self.zeros)
        for name, scaled in (("scale_factors", self.scales), ("min_factors", self.mins)):
            factors = getattr(self, name)
            if factors is not None and (
                scaled is None
                or factors.dim() != 2
                or factors.shape[0] != self.num_outputs
                or factors.shape[1] == 0
                or grid[1] % factors.shape[1]
                or factors.dtype not in _FLOATS
            ):
                raise _wrong(name, f"floats [{self.num_outputs}, a divisor of {grid[1]}]", factors)
        table, order = self.table, self.order
        if table is not None and (table.shape != (16,) or table.dtype != torch.int8 or self.bits > 4):
            raise _wrong("table", "16 values of int8, for codes of at most 4 bits", table)
        if order is not None and order.shape != (self.num_inputs,):
            raise _wrong("order", f"the shape [{self.num_inputs}]", order)

    @property
    def num_outputs(self) -> int:
        return int(self.codes.shape[0])

    @property
    def num_inputs(self) -> int:
        return int(self.codes.shape[1])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self._tensors().values())

    @property
    def form(self) -> str:
        """How layers that dequantize it again and again call it."""
        kind = "float8" if self.codes.dtype is torch.float8_e4m3fn else f"{self.bits} bits"
        return f"{kind} without kernels"

    def to(self, device: torch.device) -> Self:
        """The same matrix on another device."""
        moved = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def dequantized(self) -> torch.Tensor:
        """float32 [outputs, inputs], the inputs in their own order: exactly what the format says."""
        return self._unordered(self._values())

    def rows(self, index: slice | torch.Tensor) -> Self:
        """Some of its outputs."""
        return replace(self, **{name: tensor[index] for name, tensor in self._grid().items()})

    def inputs(self, start: int, stop: int) -> Self:
        """Some of its inputs, from `start` up to `stop`: a rank's share.

        InvalidArgumentError if that cuts a group. UnsupportedError if the inputs are not in their own order: those of
        one group are spread over all ranks.
        """
        if self.order is not None:
            raise UnsupportedError("the inputs of weights that are sorted by group cannot be split over ranks")
        if start % self.group or (stop % self.group and stop != self.num_inputs):
            raise InvalidArgumentError(f"inputs {start} to {stop} are not whole groups of {self.group}")
        first, last = start // self.group, -(-stop // self.group)
        cut = {"codes": self.codes[:, start:stop]}
        for name in ("scales", "zeros", "mins"):
            if (tensor := getattr(self, name)) is not None:
                cut[name] = tensor[:, first:last]
        for name in ("scale_factors", "min_factors"):
            if (tensor := getattr(self, name)) is not None:
                each = self.scales.shape[1] // tensor.shape[1]
                if tensor.shape[1] == 1:
                    cut[name] = tensor
                elif first % each or last % each:
                    raise InvalidArgumentError(f"inputs {start} to {stop} cut what {each} groups share")
                else:
                    cut[name] = tensor[:, first // each : last // each]
        return replace(self, **cut)

    def is_like(self, other: Self) -> bool:
        """Whether both are described alike, so that one layer can have the outputs of both."""
        for name in ("table", "order"):
            own, its = getattr(self, name), getattr(other, name)
            if (own is None) != (its is None) or (own is not None and not torch.equal(own, its)):
                return False
        own_parts, its_parts = self._grid(), other._grid()
        return (
            (self.group, self.bits, self.activations) == (other.group, other.bits, other.activations)
            and own_parts.keys() == its_parts.keys()
            and all(
                (own.dtype, own.shape[1:], own.device) == (its_parts[name].dtype, its_parts[name].shape[1:], own.device)
                for name, own in own_parts.items()
            )
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The outputs of all parts below each other. InvalidArgumentError unless all are alike."""
        first, *others = parts
        if not all(first.is_like(other) for other in others):
            raise InvalidArgumentError("weights of different formats cannot be joined into one matrix")
        if not others:
            return first
        return replace(first, **{name: torch.cat([part._grid()[name] for part in parts]) for name in first._grid()})

    @classmethod
    def collected(cls, parts: Iterable[Self], num_outputs: int) -> Self:
        """The same of parts that come one after the other; none of them is kept. All are alike."""
        whole: Self | None = None
        first = 0
        for part in parts:
            if part.num_outputs == num_outputs:
                return part
            if whole is None:
                grid = part._grid().items()
                whole = replace(part, **{name: each.new_empty(num_outputs, *each.shape[1:]) for name, each in grid})
            for name, each in part._grid().items():
                whole._grid()[name][first : first + part.num_outputs] = each
            first += part.num_outputs
        assert whole is not None, "a matrix has parts"
        return whole

    def scales_in_floats(self) -> torch.Tensor:
        """float32 [outputs, groups]"""
        return _scaled(self.scales, self.scale_factors)

    def mins_in_floats(self) -> torch.Tensor | None:
        """float32 [outputs, groups]"""
        return None if self.mins is None else _scaled(self.mins, self.min_factors)

    def _values(self) -> torch.Tensor:
        """The columns as the codes have them."""
        values = self.codes.float() if self.table is None else self.table[self.codes.long()].float()
        if self.zeros is not None:
            values -= self._each_input(self.zeros.float())
        values *= self._each_input(self.scales_in_floats())
        mins = self.mins_in_floats()
        return values if mins is None else values.sub_(self._each_input(mins))

    def _unordered(self, values: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, self.order.long()] = values
        return ordered

    def _each_input(self, grouped: torch.Tensor) -> torch.Tensor:
        return grouped.repeat_interleave(self.group, dim=1)[:, : self.num_inputs]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), torch.Tensor)
        }

    def _grid(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._tensors().items() if name in _GRID}


def _scaled(values: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    values = values.float()
    if factors is None:
        return values
    return values * factors.float().repeat_interleave(values.shape[1] // factors.shape[1], dim=1)


def _wrong(name: str, expected: str, tensor: torch.Tensor) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: expected {expected}, got {tensor.dtype} {list(tensor.shape)}")
