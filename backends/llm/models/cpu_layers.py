"""All layers of a decoder in one call of the kernels on a CPU.

Each product of a few rows fills the processor's caches with weights, so that the Python between two products runs from
memory: a quarter of the time of a token. In one call there is none. Layers compute what they compute one by one, to the
bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..attention.cpu_attention import CpuAttention
from ..kernels import kernels_for, packed_kernels_for
from ..lora.layers import LoraLinear
from ..lora.step import StepAdapters
from ..step_context import StepContext
from .linear import Linear
from .norm import Norm, RmsNorm
from .packed_matrix import PackedMatrixLinear, SideBySide

_CPU = torch.device("cpu")
# As many kinds of rotation as `compute_layers` takes.
_MOST_ROTATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinableLayer:
    """A layer whose parts the kernels know.

    `products` are those to queries, keys and values, of attention, to gates and ups, and down. Each is
    in one part or several, side by side. `adapted` are those of them that adapters may add to, None for others.
    `rotation` is the number of its rotation, -1 without any.
    """

    index: int
    rotation: int
    attention_norm: RmsNorm
    mlp_norm: RmsNorm
    head_norm: RmsNorm | None
    products: tuple[tuple[PackedMatrixLinear, ...], ...]
    adapted: tuple[LoraLinear | None, ...]

    def packed(self, attention: CpuAttention) -> bytes:
        """`LayerHead` of `_kernels.c`, and the parts of the products."""
        kept, window, sinks = attention.facts_of(self.index)
        head_norm = self.head_norm
        head = struct.pack(
            "11q3d",
            self.attention_norm.weight.data_ptr(),
            0 if head_norm is None else head_norm.weight.data_ptr(),
            self.mlp_norm.weight.data_ptr(),
            kept,
            window,
            sinks,
            self.rotation,
            *map(len, self.products),
            self.attention_norm.eps,
            0.0 if head_norm is None else head_norm.eps,
            self.mlp_norm.eps,
        )
        return head + b"".join(map(_packed_parts, self.products))


class JoinedLayers:
    """The layers of a network whose dtype is float32, where all are norms, attention and a gated feed-forward."""

    def __init__(self, layers: Sequence[JoinableLayer], multiply: int, add: int) -> None:
        self._layers = tuple(layers)
        self._functions = multiply, add
        self._attention: CpuAttention | None = None
        self._packed = b""
        self._adapters_key: object = None
        self._adapters: bytes | None = b""
        qkv, output, up, down = (_width(parts) for parts in layers[0].products)
        inner = down[0]
        self._numbers = (len(layers), qkv[0], inner, qkv[0] + max(qkv[1] + output[0], 3 * inner))
        assert up[1] == 2 * inner, "gates and ups side by side"

    def compute(self, hidden: torch.Tensor, step: StepContext) -> bool:
        """Pass `hidden` [tokens, hidden_size] through all layers in place; False if layers must do it one by one."""
        attention = step.attention
        if not isinstance(attention, CpuAttention) or step.inputs.prefills:
            return False
        adapters = b"" if step.adapters is None else self._additions(step.adapters)
        if adapters is None:
            return False
        if self._attention is not attention:
            self._pack(attention)
        bounds = 0 if step.adapters is None else step.adapters.bounds_address
        attention.compute_layers(self._packed, adapters, bounds, hidden, self._numbers[3], step.rotations, step.inputs)
        return True

    def _additions(self, step: StepAdapters) -> bytes | None:
        """What adapters add to each product of each layer; None where one of them does more than add."""
        if self._adapters_key != step.key:
            self._adapters_key = step.key
            linears = [linear for layer in self._layers for linear in layer.adapted]
            self._adapters = None
            if not any(linear is not None and linear.has_gains for linear in linears):
                added = [b"" if linear is None else linear.additions(step) for linear in linears]
                self._adapters = b"".join(struct.pack("q", len(each)) + each for each in added)
        return self._adapters

    def _pack(self, attention: CpuAttention) -> None:
        matrix_bytes = len(self._layers[0].products[0][0].matrix.description)
        head = struct.pack("7q", *self._numbers, matrix_bytes, *self._functions)
        self._packed = head + b"".join(layer.packed(attention) for layer in self._layers)
        self._attention = attention


def join_layers(layers: Sequence[JoinableLayer | None]) -> JoinedLayers | None:
    """None where a layer has a part that the kernels do not know, layers differ in shape, or there are no kernels."""
    multiplying = packed_kernels_for(_CPU)
    if kernels_for(_CPU, torch.float32) is None or multiplying is None:
        return None
    joinable = [layer for layer in layers if layer is not None and layer.rotation < _MOST_ROTATIONS]
    shapes = {tuple(map(_width, layer.products)) for layer in joinable}
    is_joined = len(joinable) == len(layers) and len(shapes) == 1
    return JoinedLayers(joinable, multiplying.MULTIPLY_ROWS, multiplying.ADD_ALL_RUNS) if is_joined else None


def joinable_layer(
    *,
    index: int,
    rotation: int | None,
    attention_norm: Norm,
    mlp_norm: Norm,
    head_norm: Norm | None,
    products: Sequence[Linear],
) -> JoinableLayer | None:
    """None if the kernels do not know one of the parts."""
    parts = tuple(map(_parts_of, products))
    first, second = _known_norm(attention_norm), _known_norm(mlp_norm)
    third = None if head_norm is None else _known_norm(head_norm)
    if first is None or second is None or (third is None) is not (head_norm is None) or not all(parts):
        return None
    return JoinableLayer(
        index=index,
        rotation=-1 if rotation is None else rotation,
        attention_norm=first,
        mlp_norm=second,
        head_norm=third,
        products=parts,
        adapted=tuple(linear if isinstance(linear, LoraLinear) else None for linear in products),
    )


def _known_norm(norm: Norm) -> RmsNorm | None:
    return norm if isinstance(norm, RmsNorm) and norm.weight.dtype == torch.float32 else None


def _parts_of(linear: Linear) -> tuple[PackedMatrixLinear, ...]:
    """Empty for a layer of another kind. What adapters add is left out."""
    if isinstance(linear, LoraLinear):
        linear = linear.base
    if type(linear) is PackedMatrixLinear:
        return (linear,)
    return linear.linears if type(linear) is SideBySide else ()


def _packed_parts(parts: Sequence[PackedMatrixLinear]) -> bytes:
    packed, first = b"", 0
    for part in parts:
        packed += struct.pack("2q", first, 0 if part.bias is None else part.bias.data_ptr()) + part.matrix.description
        first += part.matrix.num_outputs
    return packed


def _width(parts: Sequence[PackedMatrixLinear]) -> tuple[int, int]:
    """Inputs and outputs."""
    return parts[0].matrix.num_inputs, sum(part.matrix.num_outputs for part in parts)
