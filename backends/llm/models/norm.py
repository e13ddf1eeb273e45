"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from ..kernels import kernels_for

Norm = Callable[[torch.Tensor], torch.Tensor]


class RmsNorm:
    """x / rms(x) * weight over the last dimension; of a `weight` [heads, head_dim] each head has its own row."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.contiguous()
        self.eps = eps
        self._shape = (weight.shape[-1],)
        self._is_shared = weight.dim() == 1
        self._num_weights = weight.numel() // weight.shape[-1]
        self._kernels = kernels_for(weight.device, weight.dtype)
        # On a CPU torch's rms_norm is seven small steps; these are four.
        self._is_split = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._eps_column = torch.full((1, 1), eps, dtype=torch.float32)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if values.dtype != self.weight.dtype:  # weights that half precision would round away stay float32
            return self._normalised(values.to(self.weight.dtype)).to(values.dtype)
        return self._normalised(values)

    def is_of_heads(self, dtype: torch.dtype) -> bool:
        """Whether each head has weights of its own, in this datatype."""
        return not self._is_shared and self.weight.dtype is dtype

    def _normalised(self, values: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and self._has_rows_for_kernel(values):
            return self._by_kernel(self._kernels, values)
        if self._is_split and values.dim() == 2:
            norms = torch.linalg.vector_norm(values, 2, -1, True)
            scales = torch.addcmul(self._eps_column, norms, norms, value=1.0 / self._shape[0]).rsqrt_()
            return torch.mul(values, scales).mul_(self.weight)
        if self._is_shared:
            return F.rms_norm(values, self._shape, self.weight, self.eps)
        return F.rms_norm(values, self._shape, None, self.eps).mul_(self.weight)

    def _has_rows_for_kernel(self, values: torch.Tensor) -> bool:
        """Whether values are [rows, width] without gaps, or [tokens, heads, width] without gaps within a token."""
        if self._is_shared:
            return values.dim() == 2 and bool(values.shape[1] == self._shape[0]) and values.is_contiguous()
        return (*values.shape[1:], *values.stride()[1:]) == (*self.weight.shape, *self.weight.stride())

    def _by_kernel(self, kernels: ModuleType, values: torch.Tensor) -> torch.Tensor:
        width = self._shape[0]
        output = torch.empty(values.shape, dtype=values.dtype)
        kernels.normalise(
            values.data_ptr(),
            self.weight.data_ptr(),
            output.data_ptr(),
            values.numel() // width,
            width,
            self._num_weights,
            values.stride(0),
            values.dtype is torch.bfloat16,
            torch.get_num_threads(),
            self.eps,
        )
        return output


class LayerNorm:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(values, self._weight.shape, self._weight, self._bias, self._eps)


class WholeQkNorm:
    """Normalises all query heads of a token together, and all key heads; weights are [heads * head_dim] of each."""

    def __init__(self, query_weight: torch.Tensor, key_weight: torch.Tensor, *, num_heads: int, eps: float) -> None:
        self._queries = RmsNorm(query_weight, eps)
        self._keys = RmsNorm(key_weight, eps)
        self._num_heads = num_heads

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + key heads, head_dim] -> the same."""
        rows, _, head_dim = heads.shape
        queries = self._queries(heads[:, : self._num_heads].reshape(rows, -1))
        keys = self._keys(heads[:, self._num_heads :].reshape(rows, -1))
        return torch.cat((queries, keys), dim=1).view(rows, -1, head_dim)


def identity(values: torch.Tensor) -> torch.Tensor:
    """Where a family has no norm."""
    return values
