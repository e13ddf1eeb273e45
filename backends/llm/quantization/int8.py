"""Weights in 8 bits with a scale per output row: half the memory of bfloat16, and half the time where memory rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from ..models.linear import Linear, multiplies_bfloat16
from ..models.linear_tensors import LinearTensors
from ..step_context import StepContext
from .scheme import Scheme

# From this number of rows on, multiplying takes most of the time: expand the weight once and use the float product.
# A CPU without instructions for bfloat16 does that in float32, which is faster there by a factor of three.
_EXPANDED_ROWS = 48
_EXPANDED_ROWS_FLOAT32 = 16


class Int8(Scheme):
    """Made from floats when a model is loaded."""

    is_online = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        if config is not None:
            raise UnsupportedError("quantization 'int8' is not supported in checkpoints: it is made from floats")
        return cls()

    def linear(self, tensors: LinearTensors) -> Linear:
        return Int8Linear(tensors.weight(), tensors.bias())


class Int8Linear:
    """Rounds each row of `weight` [out_features, in_features] to 255 steps of its largest value; bias stays float."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._dtype = weight.dtype
        steps = weight.float().abs().amax(dim=1).clamp_(min=1e-12) / 127.0
        self.weight = (weight.float() / steps[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        self.scales = steps.to(torch.bfloat16)
        self._bias = bias
        is_float32 = weight.device.type == "cpu" and not multiplies_bfloat16()
        self._expanded_dtype = torch.float32 if is_float32 else torch.bfloat16
        self._expanded_rows = _EXPANDED_ROWS_FLOAT32 if is_float32 else _EXPANDED_ROWS

    def __call__(self, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        output = self._product(rows).to(self._dtype)
        return output if self._bias is None else output.add_(self._bias)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return residual.add_(self(rows, step))

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.device.type == "cpu" and rows.shape[0] < self._expanded_rows:
            return torch._weight_int8pack_mm(rows.to(torch.bfloat16).contiguous(), self.weight, self.scales)
        return F.linear(rows.to(self._expanded_dtype), self.weight.to(self._expanded_dtype)).mul_(self.scales)
