"""Layers over a `DeviceMatrix`: on a GPU, and with Triton. Who imports this has asked `device_profile` before."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ..step_context import StepContext
from . import triton_linear
from .device_matrix import DeviceForm, DeviceMatrix, float_matrix
from .linear import Linear, PlainLinear

logger = logging.getLogger(__name__)

# Up to as many rows, weights are dequantized in the product; of more, a dequantized copy is multiplied by cuBLAS, since
# reading that costs less than dequantizing each weight for each tile of rows.
MOST_TILE_ROWS = 64
# Weights of such a copy that exist at a time.
_VALUES_AT_ONCE = 1 << 27
# Rows of a trial: `_int_mm` wants more than 16.
_TRIAL_ROWS = 32
_LARGEST_FLOAT8 = 448.0
_SMALLEST_SCALE = 1e-12

_Product = Callable[[torch.Tensor], torch.Tensor]


class DeviceLinear:
    """`activations`: int8 or float8_e4m3fn, to which many rows may be rounded, with a scale for each."""

    def __init__(self, matrix: DeviceMatrix, bias: torch.Tensor | None, activations: torch.dtype | None = None) -> None:
        self.matrix = matrix
        self.bias = bias
        self.form = matrix.form.name
        self.num_bytes = matrix.num_bytes
        self._rounded = None if activations is None else _rounded_product(matrix, activations)

    def __call__(self, rows: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        return self._multiply(rows, None)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        if residual.dtype is rows.dtype and residual.is_contiguous():
            return self._multiply(rows, residual)
        return residual.add_(self(rows, step))

    def _multiply(self, rows: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self.matrix.order is not None:
            rows = rows.index_select(1, self.matrix.order)
        if 0 < rows.shape[0] <= MOST_TILE_ROWS:
            return triton_linear.multiply(self.matrix, rows, self.bias, residual)
        output = self._dense(rows) if self._rounded is None else self._rounded(rows)
        if self.bias is not None:
            output += self.bias
        return output if residual is None else residual.add_(output)

    def _dense(self, rows: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        step = max(1, _VALUES_AT_ONCE // matrix.num_inputs)
        parts = [
            F.linear(
                rows, triton_linear.expand(matrix, slice(first, min(first + step, matrix.num_outputs)), rows.dtype)
            )
            for first in range(0, matrix.num_outputs, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class DeviceEmbedding:
    """Dequantizes the rows of the tokens that are asked for, of a matrix that the head may multiply by as well."""

    def __init__(self, matrix: DeviceMatrix, dtype: torch.dtype) -> None:
        self.matrix = matrix
        self._dtype = dtype
        self.form = matrix.form.name
        self.num_bytes = matrix.num_bytes

    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        return triton_linear.expand(self.matrix, token_ids, self._dtype)

    def head(self) -> DeviceLinear:
        """The layer of the same matrix, in the same memory."""
        return DeviceLinear(self.matrix, None)


class DeviceExperts:
    """The same layer of all experts, one after another in `matrix` and `bias`: one product, for which no host waits."""

    is_capturable = True

    def __init__(self, matrix: DeviceMatrix, bias: torch.Tensor | None) -> None:
        self.form = matrix.form.name
        self.num_bytes = matrix.num_bytes
        self._matrix = matrix
        self._bias = bias

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, _step: StepContext | None, /) -> torch.Tensor:
        if self._matrix.order is not None:
            rows = rows.index_select(1, self._matrix.order)
        return triton_linear.multiply_grouped(self._matrix, rows, counts, self._bias)


def device_experts(linears: Sequence[Linear], num_processors: int) -> DeviceExperts | None:
    """One matrix of the same layer of all experts, for a device with `num_processors`; None unless all are alike."""
    matrices, biases = [], []
    for linear in linears:
        if isinstance(linear, PlainLinear):
            matrices.append(float_matrix(linear.weight, num_processors))
        elif isinstance(linear, DeviceLinear):
            matrices.append(linear.matrix)
        else:
            return None
        if linear.bias is not None:
            biases.append(linear.bias)
    matrix = DeviceMatrix.joined(matrices)
    if matrix is None or len(biases) not in (0, len(linears)):
        return None
    return DeviceExperts(matrix, torch.cat(biases) if biases else None)


def _rounded_product(matrix: DeviceMatrix, activations: torch.dtype) -> _Product | None:
    """torch's product of rows and weights in 8 bits; None where the weights or the device do not allow it."""
    is_plain = matrix.num_groups == 1 and matrix.zeros is None and not matrix.zero and matrix.mins is None
    if not is_plain or matrix.scales is None or matrix.codes.shape[1] != matrix.num_inputs:
        return None
    if (matrix.form, matrix.codes.dtype, activations) == (DeviceForm.CODES8, torch.int8, torch.int8):
        product: _Product = functools.partial(_by_int8, matrix.codes.t(), matrix.scales.float().t())
    elif (matrix.form, activations) == (DeviceForm.FLOAT8, torch.float8_e4m3fn):
        product = functools.partial(
            _by_float8, matrix.codes.view(torch.float8_e4m3fn).t(), matrix.scales.float().t().contiguous()
        )
    else:
        return None
    try:
        product(torch.zeros(_TRIAL_ROWS, matrix.num_inputs, dtype=torch.bfloat16, device=matrix.codes.device))
    except RuntimeError as error:  # the device is too old, or a length does not suit it
        logger.debug("no product of %s by %s: %s", activations, matrix.form.name, error)
        return None
    return product


def _by_int8(weights: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    codes, row_scales = triton_linear.round_rows(rows)
    return (torch._int_mm(codes, weights) * row_scales).mul_(scales).to(rows.dtype)


def _by_float8(weights: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    row_scales = rows.abs().amax(dim=1, keepdim=True).float().clamp_(min=_SMALLEST_SCALE) / _LARGEST_FLOAT8
    codes = (rows.float() / row_scales).to(torch.float8_e4m3fn)
    # Of the datatypes of rows, it gives bfloat16 alone everywhere.
    return torch._scaled_mm(codes, weights, row_scales, scales, out_dtype=torch.bfloat16).to(rows.dtype)
