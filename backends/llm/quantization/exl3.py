"""EXL3: 1 to 8 bits a weight, which say where to go on from state to state, between rotations of inputs and outputs.

A tile of 16 x 16 weights is a ring of bits. The state of a weight is the 16 bits that end with its own, and a codebook
that is computed gives its value. W = diag(suh) H V H diag(svh), H a Hadamard matrix for each 128 rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..models.linear import Linear, float_linear
from ..models.linear_tensors import LinearTensors, Part
from .config_fields import checkpoints_only
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme

_TILE = 16
_TILE_WEIGHTS = _TILE * _TILE
_STATE_BITS = 16
_ROTATED = 128
_FIRST_FACTOR, _FIRST_TERM = 89226354, 64248484
# Of the first two codebooks: bits of two halves that vary, and what they are combined with.
_VARYING, _FIXED = 0x8FFF8FFF, 0x3B603B60
# Of the third: what the sum of four bytes is multiplied by, and what is added, in float16.
_SUM_FACTOR, _SUM_TERM = (float(np.array(bits, np.uint16).view(np.float16)) for bits in (0x1EEE, 0xC931))


class Exl3(StoredScheme):
    """Weights become floats in the network's datatype when they are loaded."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        checkpoints_only("exl3", config)
        return cls()

    @property
    def has_codes(self) -> bool:
        return False

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "trellis") or not tensors.has(part, "weight")

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:  # noqa: ARG002 - nothing asks for it
        raise AssertionError("its values are not on a grid")

    def check(self, tensors: LinearTensors) -> None:
        for part in tensors.parts:
            if self.is_quantized(tensors, part):
                _stored(tensors, part)
            else:
                tensors.check_floats(part)

    def linear(self, tensors: LinearTensors) -> Linear:
        dense = [
            tensors.share(part, _dense(tensors, part), outputs=0, inputs=1).to(tensors.dtype) for part in tensors.parts
        ]
        return float_linear(tensors.placed(torch.cat(dense)), tensors.bias())


def _dense(tensors: LinearTensors, part: Part) -> torch.Tensor:
    """float32 [outputs, inputs]"""
    trellis, input_signs, output_signs = _stored(tensors, part)
    rotated = _values(trellis, _codebook(*_codebook_of(tensors, part)))
    turned = _turned(rotated.unflatten(0, (-1, _ROTATED))).flatten(0, 1) * input_signs[:, None]
    whole = _turned(turned.t().unflatten(0, (-1, _ROTATED))).flatten(0, 1) * output_signs[:, None]
    return whole[: part.num_outputs]


def _stored(tensors: LinearTensors, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bits int16 [tiles of inputs, tiles of outputs, words], and factors of inputs and outputs in float32."""
    trellis = tensors.stored(part, "trellis", None, (torch.int16,))
    shape = list(trellis.shape)
    # The outputs of a head are filled up.
    outputs = part.num_outputs + -part.num_outputs % _ROTATED
    if part.num_inputs % _ROTATED or shape[:2] != [part.num_inputs // _TILE, outputs // _TILE] or len(shape) != 3:
        raise InvalidArgumentError(
            f"{part.name}.trellis has the shape {shape}: {part.num_inputs} inputs and {part.num_outputs} outputs have "
            f"{part.num_inputs // _TILE} x {outputs // _TILE} tiles, in blocks of {_ROTATED}"
        )
    if shape[2] % _TILE or not 1 <= shape[2] // _TILE <= 8:
        raise UnsupportedError(f"{part.name}.trellis of {shape[2] / _TILE} bits is not supported: whole ones up to 8")
    return trellis, _signs(tensors, part, "su", part.num_inputs), _signs(tensors, part, "sv", outputs)


def _signs(tensors: LinearTensors, part: Part, name: str, length: int) -> torch.Tensor:
    """float32 [length]: factors in float16, or in older checkpoints a bit for each, the low ones first."""
    if tensors.has(part, f"{name}h"):
        return tensors.stored(part, f"{name}h", (length,), (torch.float16,)).float()
    words = tensors.stored(part, name, (length // _STATE_BITS,), (torch.int16,)).int()
    return 1.0 - 2.0 * (words[:, None] >> torch.arange(_STATE_BITS) & 1).flatten().float()


def _codebook_of(tensors: LinearTensors, part: Part) -> tuple[str, int]:
    """Its kind, and the factor that the checkpoint gives."""
    for kind in ("mcg", "mul1"):
        if tensors.has(part, kind):
            factor = tensors.stored(part, kind, None, (torch.int32,))
            if factor.numel() != 1:
                raise InvalidArgumentError(f"{part.name}.{kind} must be one number, got {factor.numel()}")
            return kind, int(factor.view(-1)[0]) & 0xFFFFFFFF
    return "first", _FIRST_FACTOR


@functools.cache
def _codebook(kind: str, factor: int) -> torch.Tensor:
    """float32 [65536]: the value of each state, as float16 arithmetic makes it."""
    states = np.arange(1 << _STATE_BITS, dtype=np.uint32) * np.uint32(factor)
    if kind == "mul1":
        sums = states.view(np.uint8).reshape(-1, 4).sum(axis=1).astype(np.float64)
        # The sum is the mantissa of a half that begins at 1024; it is multiplied and added with one rounding.
        values = ((1024.0 + sums) * _SUM_FACTOR + _SUM_TERM).astype(np.float16)
    else:
        if kind == "first":
            states += np.uint32(_FIRST_TERM)
        halves = ((states & np.uint32(_VARYING)) ^ np.uint32(_FIXED)).view(np.float16).reshape(-1, 2)
        values = halves[:, 0] + halves[:, 1]
    return torch.from_numpy(values.astype(np.float32))


@functools.cache
def _places() -> torch.Tensor:
    """int64 [256]: where a tile's weights lie in it by rows, in the order of the ring: that of a tensor core."""
    lanes = torch.arange(32)[:, None]
    rows = lanes % 4 * 2 + torch.tensor([0, 1, 8, 9, 0, 1, 8, 9])
    columns = lanes // 4 + torch.tensor([0, 0, 0, 0, 8, 8, 8, 8])
    return (rows * _TILE + columns).flatten()


def _values(trellis: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """float32 [inputs, outputs], rotated."""
    rows, columns, num_halves = trellis.shape
    bits, ring = num_halves // _TILE, num_halves * _STATE_BITS
    starts = (torch.arange(_TILE_WEIGHTS) * bits + bits - _STATE_BITS) % ring
    first, shift = starts // 32, 48 - starts % 32
    places, following = _places(), (first + 1) % (num_halves // 2)
    values = torch.empty(rows, _TILE, columns, _TILE)
    for row in range(rows):
        # A word has its first bit at the top.
        words = trellis[row].contiguous().view(torch.int32).long() & 0xFFFFFFFF
        states = ((words[:, first] << 32) | words[:, following]) >> shift & 0xFFFF
        tiles = torch.empty(columns, _TILE_WEIGHTS)
        tiles[:, places] = codebook[states]
        values[row] = tiles.view(columns, _TILE, _TILE).transpose(0, 1)
    return values.view(rows * _TILE, columns * _TILE)


def _turned(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 128, n], each multiplied from the left by a Hadamard matrix of length 1."""
    return _hadamard() @ blocks


@functools.cache
def _hadamard() -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < _ROTATED:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(_ROTATED)
