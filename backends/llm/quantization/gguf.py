"""The types of GGUF: blocks stay in about as many bits as the file has, and are multiplied so."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Self

import torch

from modelserver.backend import UnsupportedError

from ..checkpoint.gguf_blocks import describe
from ..checkpoint.gguf_types import BY_NAME, TensorType
from ..kernels import packed_kernels_for
from ..models.linear import Linear, TokenEmbedding
from ..models.linear_tensors import LinearTensors, Part
from ..models.packed_matrix import PackedMatrix, PackedMatrixEmbedding
from .config_fields import checkpoints_only
from .packing import pack
from .quantized_linear import packed_linear
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme

# Values of a matrix that are described at once.
_CHUNK_VALUES = 1 << 22
# Of blocks that are packed straight from the file, what is read at once.
_BYTES_AT_ONCE = 1 << 21


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

    @property
    def has_codes(self) -> bool:
        return bool(self._types)

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "blocks")

    def check(self, tensors: LinearTensors) -> None:
        for part in tensors.parts:
            if self.is_quantized(tensors, part):
                self._stored(tensors, part)
            else:
                tensors.check_floats(part)

    def linear(self, tensors: LinearTensors) -> Linear:
        matrices = self._packed(tensors)
        return super().linear(tensors) if matrices is None else packed_linear(matrices, tensors.bias())

    def embedding(self, tensors: LinearTensors) -> TokenEmbedding:
        matrices = self._packed(tensors) if self.is_quantized(tensors, tensors.parts[0]) else None
        return super().embedding(tensors) if matrices is None else PackedMatrixEmbedding(matrices[0], tensors.dtype)

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        kind, blocks = self._stored(tensors, part)
        weight = quantized_weight(kind, blocks)
        if not tensors.has(part, "scale"):
            return weight
        if weight.scale_factors is not None or weight.mins is not None:
            raise UnsupportedError(f"a scale for the whole of {part.name}, a {kind.name}, is not supported")
        factor = tensors.stored(part, "scale").float().reshape(1, 1)
        return replace(weight, scale_factors=factor.expand(weight.num_outputs, 1).contiguous())

    def _packed(self, tensors: LinearTensors) -> list[PackedMatrix] | None:
        """Straight from the file: neighbours of one type become one matrix. None for what `read` has to describe."""
        kernels = packed_kernels_for(tensors.device)
        if kernels is None or not tensors.is_in_rows:
            return None
        known = kernels.block_types()
        kinds = {part: self._kind(tensors, part) for part in tensors.parts}
        if any(kind.number not in known or tensors.has(part, "scale") for part, kind in kinds.items()):
            return None
        return [
            pack_blocks(
                kind,
                (piece for part in parts for piece in self._rows(tensors, part, kind)),
                kernels,
                shape=(sum(part.num_outputs for part in parts), tensors.parts[0].num_inputs),
            )
            for kind, run in itertools.groupby(tensors.parts, kinds.__getitem__)
            if (parts := list(run))
        ]

    def _kind(self, tensors: LinearTensors, part: Part) -> TensorType:
        return BY_NAME[self._types[tensors.checkpoint.module(part.name) or part.name]]

    def _rows(self, tensors: LinearTensors, part: Part, kind: TensorType) -> Iterator[torch.Tensor]:
        return tensors.rows(part, "blocks", _shape(part, kind), _BYTES_AT_ONCE)

    def _stored(self, tensors: LinearTensors, part: Part) -> tuple[TensorType, torch.Tensor]:
        """Its type, and its blocks [outputs, bytes of a row]."""
        kind = self._kind(tensors, part)
        return kind, tensors.stored(part, "blocks", _shape(part, kind))


def _shape(part: Part, kind: TensorType) -> tuple[int, int]:
    """Of its blocks: outputs, and bytes of a row."""
    return part.num_outputs, part.num_inputs // kind.block_len * kind.block_bytes


def quantized_weight(kind: TensorType, rows: torch.Tensor) -> QuantizedWeight:
    """A matrix in blocks, uint8 [outputs, bytes of a row], exactly."""
    num_rows = rows.shape[0]
    num_blocks = rows.shape[1] // kind.block_bytes
    step = max(1, _CHUNK_VALUES // max(1, num_blocks * kind.block_len))
    parts = (rows[first : first + step] for first in range(0, max(1, num_rows), step))
    return QuantizedWeight.collected((_described(kind, part) for part in parts), num_rows)


def pack_blocks(
    kind: TensorType, pieces: Iterable[torch.Tensor], kernels: ModuleType, *, shape: tuple[int, int]
) -> PackedMatrix:
    """The same in its packed form, [outputs, inputs] = `shape`, of a type of `kernels.block_types()`.

    `pieces` are its rows in turn, uint8 [some, bytes of a row]. It has the bits that packing `quantized_weight` gives.
    """
    num_outputs, num_inputs = shape
    row = torch.zeros(1, num_inputs // kind.block_len * kind.block_bytes, dtype=torch.uint8)
    # Everything but the number of outputs is that of any row.
    one = pack(quantized_weight(kind, row), kernels)
    assert one is not None, f"a {kind.name} has a packed form"
    matrix = one.stretched(num_outputs)
    first = 0
    for piece in pieces:
        assert piece.shape[1] == row.shape[1], "rows of blocks"
        piece = piece.contiguous()
        kernels.fill(matrix.description, kind.number, first, piece.data_ptr(), piece.shape[0], torch.get_num_threads())
        first += piece.shape[0]
    assert first == num_outputs, "the pieces are all rows"
    return matrix


def _described(kind: TensorType, rows: torch.Tensor) -> QuantizedWeight:
    blocks = describe(kind, rows.reshape(-1, kind.block_bytes))

    def grid(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.reshape(rows.shape[0], -1)

    codes, scales = grid(blocks.codes), grid(blocks.scales)
    assert codes is not None
    assert scales is not None
    table = None
    if blocks.table is not None:
        table = torch.zeros(16, dtype=torch.int8)
        table[: len(blocks.table)] = torch.tensor(blocks.table, dtype=torch.int8)
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        zeros=torch.full(scales.shape, blocks.zero, dtype=torch.uint8) if blocks.zero else None,
        mins=grid(blocks.mins),
        scale_factors=grid(blocks.scale_factors),
        min_factors=grid(blocks.min_factors),
        table=table,
        group=blocks.group,
        bits=blocks.bits,
    )
