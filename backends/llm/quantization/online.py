"""Weights that are stored in floats, made into fewer bits when a model is loaded: rounded to the nearest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch

from modelserver.backend import UnsupportedError

from ..compute_thread import compute_aside
from ..kernels import packed_kernels_for
from ..models.linear import Linear, TokenEmbedding
from ..models.linear_tensors import LinearTensors
from ..models.packed_matrix import PackedMatrix, PackedMatrixEmbedding, PackedMatrixLinear
from .packing import join_packed, pack
from .quantized_linear import quantized_embedding, quantized_linear
from .quantized_weight import QuantizedWeight
from .scheme import Scheme

# Inputs that share a scale; of layers whose inputs are not whole groups, those of a row do.
_GROUP_OF_8 = 128
_GROUP_OF_4 = 32
_LARGEST_FLOAT8 = 448.0
# Values of a matrix that a thread rounds at once: what it takes meanwhile does not grow with the matrix.
_VALUES_AT_ONCE = 1 << 18
# Below this float16 has fewer bits.
_SMALLEST_NORMAL = 2.0**-14


class OnlineScheme(Scheme):
    """The embedding is in 8 bits, and the head of a network without one of its own uses the same memory."""

    is_online = True
    name: ClassVar[str]

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        if config is not None:
            raise UnsupportedError(f"quantization {cls.name!r} is not supported in checkpoints: it is made from floats")
        return cls()

    @abstractmethod
    def rounded(self, weight: torch.Tensor) -> QuantizedWeight:
        """Of float32 [outputs, inputs]."""

    def linear(self, tensors: LinearTensors) -> Linear:
        matrix = _packed(tensors, self.rounded)
        if matrix is not None:
            return PackedMatrixLinear(matrix, tensors.bias())
        return quantized_linear(self.rounded(tensors.weight().float()), tensors.bias())

    def embedding(self, tensors: LinearTensors) -> TokenEmbedding:
        matrix = _packed(tensors, in_8_bits)
        if matrix is not None:
            return PackedMatrixEmbedding(matrix, tensors.dtype)
        return quantized_embedding(in_8_bits(tensors.weight().float()), tensors.dtype)


def _packed(tensors: LinearTensors, rounded: Callable[[torch.Tensor], QuantizedWeight]) -> PackedMatrix | None:
    """Some rows after the others. None where a matrix is rounded whole."""
    kernels = packed_kernels_for(tensors.device)
    if kernels is None or not tensors.is_in_rows:
        return None
    pieces = _in_blocks(tensors.weight_rows(_VALUES_AT_ONCE), kernels.lanes())
    return join_packed(compute_aside(lambda piece: pack(rounded(piece.float()), kernels), pieces), tensors.num_outputs)


def _in_blocks(pieces: Iterable[torch.Tensor], lanes: int) -> Iterator[torch.Tensor]:
    """The same rows: all pieces but the last have a multiple of `lanes`."""
    left: torch.Tensor | None = None
    for piece in pieces:
        rows = piece if left is None else torch.cat((left, piece))
        cut = rows.shape[0] // lanes * lanes
        left = rows[cut:] if cut < rows.shape[0] else None
        if cut:
            yield rows[:cut]
    if left is not None:
        yield left


class Int8(OnlineScheme):
    name = "int8"

    def rounded(self, weight: torch.Tensor) -> QuantizedWeight:
        return in_8_bits(weight)


class Int4(OnlineScheme):
    """Codes from 0 to 15 between the least and the greatest weight of 32, with a code that stands for zero."""

    name = "int4"

    def rounded(self, weight: torch.Tensor) -> QuantizedWeight:
        grouped = _grouped(weight, _GROUP_OF_4)
        least, most = grouped.amin(dim=2).clamp_(max=0.0), grouped.amax(dim=2).clamp_(min=0.0)
        scales = _stored_scales((most - least) / 15)
        steps = scales.float()
        zeros = (-least / steps).round_().clamp_(0, 15)
        codes = (grouped / steps[:, :, None]).round_().add_(zeros[:, :, None]).clamp_(0, 15)
        return QuantizedWeight(
            codes=codes.to(torch.uint8).flatten(1),
            scales=scales,
            zeros=zeros.to(torch.uint8),
            group=grouped.shape[2],
            bits=4,
        )


class Fp8(OnlineScheme):
    """float8_e4m3fn with a scale for each output; rows stay in floats."""

    name = "fp8"

    def rounded(self, weight: torch.Tensor) -> QuantizedWeight:
        scales = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / _LARGEST_FLOAT8
        codes = (weight / scales).clamp_(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)
        return QuantizedWeight(codes=codes, scales=scales, group=weight.shape[1], bits=8)


def in_8_bits(weight: torch.Tensor) -> QuantizedWeight:
    """Of float32 [outputs, inputs]: 255 steps of the largest of each group."""
    grouped = _grouped(weight, _GROUP_OF_8)
    scales = _stored_scales(grouped.abs().amax(dim=2) / 127)
    codes = (grouped / scales.float()[:, :, None]).round_().clamp_(-127, 127)
    return QuantizedWeight(codes=codes.to(torch.int8).flatten(1), scales=scales, group=grouped.shape[2], bits=8)


def _grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[outputs, groups, inputs of each]"""
    return weight.unflatten(1, (-1, group if weight.shape[1] % group == 0 else weight.shape[1]))


def _stored_scales(scales: torch.Tensor) -> torch.Tensor:
    """float16 where that has all of its bits; what is nothing but zeros has a scale, too."""
    scales = scales.clamp(min=1e-12)
    return scales.half() if scales.min() >= _SMALLEST_NORMAL else scales
