"""Feed-forward layers, gated or plain."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from ..kernels import device_processors, kernels_for
from ..step_context import StepContext
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


def activation_of(name: str, *, is_gated: bool) -> Activation:
    """The function between the two projections. If gated, of gates and ups side by side: activation(gate) * up."""
    try:
        plain = _ACTIVATIONS[name]
    except KeyError:
        raise UnsupportedError(
            f"config.json asks for the activation {name!r}; known are {', '.join(sorted(_ACTIVATIONS))}"
        ) from None
    return _Gated(plain) if is_gated else plain


class Mlp:
    """down(activation(up(x)))"""

    def __init__(self, up: Linear, down: Linear, *, activation: Activation) -> None:
        self.up = up
        self.down = down
        self._activation = activation

    @property
    def is_gated_by_silu(self) -> bool:
        return isinstance(self._activation, _Gated) and self._activation.has_kernel

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return self.down(self._activation(self.up(rows, step)), step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self.down.add_to(residual, self._activation(self.up(rows, step)), step)


class _Gated:
    def __init__(self, activation: Activation) -> None:
        self._activation = activation
        self.has_kernel = activation is F.silu

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        kernels = kernels_for(both.device, both.dtype) if self.has_kernel else None
        if kernels is not None and both.is_contiguous():
            return _gated_by_kernel(kernels, both)
        if self.has_kernel and both.is_contiguous() and device_processors(both.device) is not None:
            from . import triton_gate

            return triton_gate.gate(both)
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
