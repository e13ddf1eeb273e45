"""Feed-forward layers: gated or plain, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from ..kernels import kernels_for
from .linear import Linear


def _gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    return F.gelu(values, approximate="tanh")


Activation = Callable[[torch.Tensor], torch.Tensor]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def activation_of(name: str) -> Activation:
    try:
        return _ACTIVATIONS[name]
    except KeyError:
        raise UnsupportedError(
            f"config.json asks for the activation {name!r}; known are {', '.join(sorted(_ACTIVATIONS))}"
        ) from None


class Mlp:
    """down(activation(up(x))), or with `is_gated` down(activation(gate(x)) * up(x)); `up` then gives both halves."""

    def __init__(self, up: Linear, down: Linear, *, activation: Activation, is_gated: bool) -> None:
        self._up = up
        self._down = down
        self._activation = activation
        self._is_gated = is_gated

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._down(self._inner(rows))

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._down.add_to(residual, self._inner(rows))

    def _inner(self, rows: torch.Tensor) -> torch.Tensor:
        if not self._is_gated:
            return self._activation(self._up(rows))
        both = self._up(rows)
        kernels = kernels_for(both.device, both.dtype) if self._activation is F.silu else None
        if kernels is not None and both.is_contiguous():
            return _gated_by_kernel(kernels, both)
        gate, up = both.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


def _gated_by_kernel(kernels: ModuleType, both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows [rows, gates and ups] without gaps, in one pass."""
    num_rows, width = both.shape
    output = both.new_empty(num_rows, width // 2)
    kernels.gate(
        both.data_ptr(), output.data_ptr(), num_rows, width // 2, both.dtype is torch.bfloat16, torch.get_num_threads()
    )
    return output
