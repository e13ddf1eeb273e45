"""The types of GGUF: blocks stay in about as many bits as the file has, and are multiplied so.

Every type is exactly described by codes, scales and minima. The vectors that the IQ types look up are made of at most
16 different values: those become a table, so that they take 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch

from modelserver.backend import UnsupportedError

from ..checkpoint import gguf_blocks as blocks
from ..checkpoint.gguf_types import BY_NAME, TensorType
from ..models.linear_tensors import LinearTensors, Part
from .config_fields import checkpoints_only
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme

# Values of a matrix that are described at once.
_CHUNK_VALUES = 1 << 22


class Gguf(StoredScheme):
    """Of the types of all modules in blocks, by the names that the file has for them."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        types = checkpoints_only("gguf", config).get("types")
        if not isinstance(types, Mapping):
            raise UnsupportedError("quantization 'gguf' is read from GGUF files alone")
        return cls(types)

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "blocks")

    def check(self, tensors: LinearTensors) -> None:
        for part in tensors.parts:
            if self.is_quantized(tensors, part):
                self._stored(tensors, part)
            else:
                tensors.check_floats(part)

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        kind, blocks = self._stored(tensors, part)
        weight = quantized_weight(kind, blocks)
        if not tensors.has(part, "scale"):
            return weight
        if weight.scale_factors is not None or weight.mins is not None:
            raise UnsupportedError(f"a scale for the whole of {part.name}, a {kind.name}, is not supported")
        factor = tensors.stored(part, "scale").float().reshape(1, 1)
        return replace(weight, scale_factors=factor.expand(weight.num_outputs, 1).contiguous())

    def _stored(self, tensors: LinearTensors, part: Part) -> tuple[TensorType, torch.Tensor]:
        """Its type, and its blocks [outputs, bytes of a row]."""
        kind = BY_NAME[self._types[tensors.checkpoint.module(part.name) or part.name]]
        shape = (part.num_outputs, part.num_inputs // kind.block_len * kind.block_bytes)
        return kind, tensors.stored(part, "blocks", shape)


def quantized_weight(kind: TensorType, rows: torch.Tensor) -> QuantizedWeight:
    """A matrix in blocks, uint8 [outputs, bytes of a row], exactly."""
    num_rows = rows.shape[0]
    num_blocks = rows.shape[1] // kind.block_bytes
    step = max(1, _CHUNK_VALUES // max(1, num_blocks * kind.block_len))
    parts = (rows[first : first + step] for first in range(0, max(1, num_rows), step))
    described = (_describe(kind, part.reshape(-1, kind.block_bytes), part.shape[0]) for part in parts)
    return QuantizedWeight.collected(described, num_rows)


class _Described:
    """What is known of blocks: each tensor is [blocks, n]."""

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        group: int,
        bits: int,
        zero: int = 0,
        mins: torch.Tensor | None = None,
        scale_factors: torch.Tensor | None = None,
        min_factors: torch.Tensor | None = None,
        table: tuple[int, ...] | None = None,
    ) -> None:
        self._group, self._bits, self._zero, self._table = group, bits, zero, table
        self._grid = {
            "codes": codes,
            "scales": scales,
            "mins": mins,
            "scale_factors": scale_factors,
            "min_factors": min_factors,
        }

    def matrix(self, num_rows: int) -> QuantizedWeight:
        grid = {name: tensor.reshape(num_rows, -1) for name, tensor in self._grid.items() if tensor is not None}
        zeros = torch.full(grid["scales"].shape, self._zero, dtype=torch.uint8) if self._zero else None
        table = None
        if self._table is not None:
            table = torch.zeros(16, dtype=torch.int8)
            table[: len(self._table)] = torch.tensor(self._table, dtype=torch.int8)
        return QuantizedWeight(**grid, zeros=zeros, table=table, group=self._group, bits=self._bits)


def _describe(kind: TensorType, stored: torch.Tensor, num_rows: int) -> QuantizedWeight:
    return _READERS[kind.name](stored).matrix(num_rows)


def _half(stored: torch.Tensor, at: int) -> torch.Tensor:
    """float16 [blocks, 1]"""
    return stored[:, at : at + 2].contiguous().view(torch.float16)


def _q1_0(stored: torch.Tensor) -> _Described:
    return _Described(blocks.flags(stored[:, 2:]), _half(stored, 0), group=128, bits=1, table=(-1, 1))


def _q4_0(stored: torch.Tensor) -> _Described:
    return _Described(blocks.fields(stored[:, 2:], 4, 16), _half(stored, 0), group=32, bits=4, zero=8)


def _q4_1(stored: torch.Tensor) -> _Described:
    codes = blocks.fields(stored[:, 4:], 4, 16)
    return _Described(codes, _half(stored, 0), group=32, bits=4, mins=-_half(stored, 2))


def _q5_0(stored: torch.Tensor) -> _Described:
    codes = blocks.fields(stored[:, 6:], 4, 16) | blocks.flags(stored[:, 2:6]) << 4
    return _Described(codes, _half(stored, 0), group=32, bits=5, zero=16)


def _q5_1(stored: torch.Tensor) -> _Described:
    codes = blocks.fields(stored[:, 8:], 4, 16) | blocks.flags(stored[:, 4:8]) << 4
    return _Described(codes, _half(stored, 0), group=32, bits=5, mins=-_half(stored, 2))


def _q8_0(stored: torch.Tensor) -> _Described:
    return _Described(blocks.signed(stored, 2, 34), _half(stored, 0), group=32, bits=8)


def _q2_k(stored: torch.Tensor) -> _Described:
    return _Described(
        blocks.fields(stored[:, 16:80], 2, 32),
        stored[:, :16] & 15,
        group=16,
        bits=2,
        mins=stored[:, :16] >> 4,
        scale_factors=_half(stored, 80),
        min_factors=_half(stored, 82),
    )


def _q3_k(stored: torch.Tensor) -> _Described:
    codes = (blocks.q3_codes(stored) + 4).to(torch.uint8)
    scales = blocks.q3_scales(stored[:, 96:108])
    return _Described(codes, scales, group=16, bits=3, zero=4, scale_factors=_half(stored, 108))


def _q4_k(stored: torch.Tensor) -> _Described:
    return _with_minima(stored, blocks.fields(stored[:, 16:], 4, 32), bits=4)


def _q5_k(stored: torch.Tensor) -> _Described:
    return _with_minima(stored, blocks.q5_codes(stored), bits=5)


def _with_minima(stored: torch.Tensor, codes: torch.Tensor, *, bits: int) -> _Described:
    scales, mins = blocks.scales_and_mins(stored[:, 4:16])
    factors = {"scale_factors": _half(stored, 0), "min_factors": _half(stored, 2)}
    return _Described(codes, scales, group=32, bits=bits, mins=mins, **factors)


def _q6_k(stored: torch.Tensor) -> _Described:
    scales = blocks.signed(stored, 192, 208)
    return _Described(blocks.q6_codes(stored), scales, group=16, bits=6, zero=32, scale_factors=_half(stored, 208))


def _iq4_nl(stored: torch.Tensor) -> _Described:
    codes = blocks.fields(stored[:, 2:], 4, 16)
    return _Described(codes, _half(stored, 0), group=32, bits=4, table=blocks.IQ4_VALUES)


def _iq4_xs(stored: torch.Tensor) -> _Described:
    codes, scales = blocks.fields(stored[:, 8:], 4, 16), blocks.iq4_xs_scales(stored)
    factors = _half(stored, 0)
    return _Described(codes, scales, group=32, bits=4, table=blocks.IQ4_VALUES, scale_factors=factors)


def _mxfp4(stored: torch.Tensor) -> _Described:
    """A power of two is exact in bfloat16, the smallest ones too."""
    codes, scales = blocks.fields(stored[:, 1:], 4, 16), blocks.e8m0(stored[:, :1]).bfloat16()
    return _Described(codes, scales, group=32, bits=4, table=blocks.FP4_VALUES)


def _nvfp4(stored: torch.Tensor) -> _Described:
    codes, scales = blocks.fields(stored[:, 4:], 4, 8), blocks.ue4m3(stored[:, :4]).half()
    return _Described(codes, scales, group=16, bits=4, table=blocks.FP4_VALUES)


def _tq1_0(stored: torch.Tensor) -> _Described:
    return _Described(blocks.tq1_codes(stored), _half(stored, 52), group=256, bits=2, zero=1)


def _tq2_0(stored: torch.Tensor) -> _Described:
    return _Described(blocks.fields(stored[:, :64], 2, 32), _half(stored, 64), group=256, bits=2, zero=1)


def _from_vectors(
    name: str, values: tuple[int, ...], *, group: int, divided: float
) -> Callable[[torch.Tensor], _Described]:
    """Of an IQ type: its scales of groups are odd numbers, its values `values` times 1 / `divided`, or minus them."""
    table = (*values, *(-value for value in values))
    size = 1 + max(values)
    codes_of = torch.zeros(2 * size, dtype=torch.uint8)
    codes_of[[value + size for value in table]] = torch.arange(len(table), dtype=torch.uint8)

    def describe(stored: torch.Tensor) -> _Described:
        vectors, scales, factors = blocks.VECTORS[name](stored)
        codes = codes_of[(vectors * divided).to(torch.int64) + size]
        return _Described(
            codes.flatten(1),
            scales.to(torch.uint8),
            group=group,
            bits=4,
            table=table,
            scale_factors=(factors / divided),
        )

    return describe


_READERS: dict[str, Callable[[torch.Tensor], _Described]] = {
    "Q1_0": _q1_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ2_XXS": _from_vectors("IQ2_XXS", (8, 25, 43), group=32, divided=1.0),
    "IQ2_XS": _from_vectors("IQ2_XS", (8, 25, 43), group=16, divided=1.0),
    "IQ2_S": _from_vectors("IQ2_S", (8, 25, 43), group=16, divided=1.0),
    "IQ3_XXS": _from_vectors("IQ3_XXS", (4, 12, 20, 28, 36, 44, 52, 62), group=32, divided=1.0),
    "IQ3_S": _from_vectors("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15), group=32, divided=1.0),
    "IQ1_S": _from_vectors("IQ1_S", (1, 7, 9), group=32, divided=8.0),
    "IQ1_M": _from_vectors("IQ1_M", (1, 7, 9), group=16, divided=8.0),
}
