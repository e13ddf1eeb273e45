"""gpt-oss's experts as its checkpoints store them, in 4 bits, within transformers' network of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from modelserver.backend import InvalidArgumentError

from ..checkpoint import Checkpoint, HfCheckpoint
from ..kernels import device_processors, packed_kernels_for
from ..quantization.bits import unpack_nibbles
from ..quantization.quantized_linear import quantized_linear
from ..quantization.small_floats import MX_GROUP, mxfp4
from .linear import GroupedLinear, dtype_name
from .moe import Experts
from .packed_matrix import grouped_linears

# The projections of an expert, by the names that checkpoints and transformers have for them.
_UP, _DOWN = "gate_up_proj", "down_proj"
_PARTS = ("blocks", "scales", "bias")
# Two codes in a byte.
_BLOCK_BYTES = MX_GROUP // 2


def are_kept_packed(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether a checkpoint in MXFP4 has such experts, and this device multiplies them as they are stored; elsewhere
    transformers makes floats of them.
    """
    has_kernels = packed_kernels_for(device) is not None or device_processors(device) is not None
    return has_kernels and f"layers.0.mlp.experts.{_UP}_blocks" in checkpoint


def check_datatypes(checkpoint: Checkpoint) -> None:
    """InvalidArgumentError for blocks and scales that are not bytes, which transformers would convert."""
    if not isinstance(checkpoint, HfCheckpoint):
        return
    for name in checkpoint.names():
        is_packed = name.endswith(tuple(f"{part}_{kind}" for part in (_UP, _DOWN) for kind in _PARTS[:2]))
        if is_packed and (dtype := checkpoint.dtype(name)) is not torch.uint8:
            raise InvalidArgumentError(
                f"the checkpoint in {checkpoint.place} has {name} in {dtype_name(dtype)}, expected uint8"
            )


class Mxfp4Experts(torch.nn.Module):  # type: ignore[misc]
    """Takes the place of transformers' GptOssExperts, with the checkpoint's tensors as parameters until `pack`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._num_experts = config.num_local_experts
        self._alpha, self._limit = config.swiglu_alpha, config.swiglu_limit
        hidden, width = config.hidden_size, config.intermediate_size
        for name, num_inputs, num_outputs in ((_UP, hidden, 2 * width), (_DOWN, width, hidden)):
            grid = (self._num_experts, num_outputs, num_inputs // MX_GROUP)
            self._add(f"{name}_blocks", torch.empty(*grid, _BLOCK_BYTES, dtype=torch.uint8))
            self._add(f"{name}_scales", torch.empty(grid, dtype=torch.uint8))
            self._add(f"{name}_bias", torch.empty(grid[:2]))
        self._experts: Experts | None = None

    def pack(self) -> None:
        """Bring the weights into the form that is multiplied, and let the stored tensors go."""
        self._experts = Experts(
            self._packed(_UP, is_alternating=True),
            self._packed(_DOWN, is_alternating=False),
            num_experts=self._num_experts,
            activation=self._activation,
        )

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        assert self._experts is not None, "packed when they are loaded"
        return self._experts.mix(hidden_states, routing_weights, router_indices, None)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def _packed(self, name: str, *, is_alternating: bool) -> GroupedLinear:
        """`is_alternating`: gates and ups take turns in the checkpoint."""
        blocks, scales, bias = (getattr(self, f"{name}_{part}").data for part in _PARTS)
        linears = []
        for expert in range(self._num_experts):
            parts = [blocks[expert].flatten(1), scales[expert], bias[expert]]
            if is_alternating:
                parts = [torch.cat((part[::2], part[1::2])) for part in parts]
            linears.append(quantized_linear(mxfp4(unpack_nibbles(parts[0]), parts[1]), parts[2]))
        for part in _PARTS:
            delattr(self, f"{name}_{part}")
        return grouped_linears(linears, blocks.device)

    def _activation(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return (up + 1) * gate * torch.sigmoid(gate * self._alpha)


@contextmanager
def taking_their_place() -> Iterator[None]:
    """Networks of gpt-oss that transformers builds meanwhile have experts in MXFP4."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    own = GptOssMLP.__init__

    def make(layer: Any, config: Any) -> None:
        own(layer, config)  # type: ignore[no-untyped-call]  # experts in floats take no memory yet
        layer.experts = Mxfp4Experts(config)

    GptOssMLP.__init__ = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        GptOssMLP.__init__ = own  # type: ignore[method-assign]


def pack_experts(model: torch.nn.Module) -> bool:
    """Pack those of a network, layer by layer; whether it has any."""
    found = [module for module in model.modules() if isinstance(module, Mxfp4Experts)]
    for module in found:
        module.pack()
    return bool(found)
