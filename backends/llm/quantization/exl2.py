"""EXL2: runs of inputs in 8 to 2 bits, sorted by how much they matter, with scales in 4 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Self

import torch

from modelserver.backend import InvalidArgumentError

from ..models.linear_tensors import LinearTensors, Part
from .bits import unpack_words
from .config_fields import checkpoints_only
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme

_WORD = 32
_BITS = range(2, 9)
# The outputs of a head are filled up to a multiple of this.
_PADDING = 32


class Exl2(StoredScheme):
    """All codes are held in bytes, since one matrix mixes widths."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        checkpoints_only("exl2", config)
        return cls()

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "q_weight") or not tensors.has(part, "weight")

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        inputs, outputs = part.num_inputs, part.num_outputs
        packed = tensors.stored(part, "q_weight", None, (torch.int32,))
        stored_outputs = packed.shape[1] if packed.dim() == 2 else 0
        if stored_outputs not in (outputs, outputs + -outputs % _PADDING):
            raise InvalidArgumentError(
                f"{part.name}.q_weight has the shape {list(packed.shape)}, expected [rows, {outputs}]"
            )
        described = tensors.vector(part, "q_groups", (torch.int16,), longest=2 * inputs)
        runs = _runs(part, described, packed.shape[0])
        lengths = [rows * _WORD // bits for bits, rows in runs]
        if sum(lengths) != inputs:
            raise InvalidArgumentError(f"{part.name}.q_groups describe {sum(lengths)} inputs, expected {inputs}")
        group = math.gcd(*lengths)
        each = torch.arange(len(runs)).repeat_interleave(torch.tensor([length // group for length in lengths]))
        zeros = torch.tensor([1 << (bits - 1) for bits, _ in runs], dtype=torch.uint8)
        order = tensors.stored(part, "q_invperm", (inputs,), (torch.int32, torch.int16)).long().argsort()
        return QuantizedWeight(
            codes=_codes(packed[:, :outputs], runs),
            scales=_scales(tensors, part, len(runs), stored_outputs)[:outputs][:, each],
            zeros=zeros[each].expand(outputs, -1).contiguous(),
            group=group,
            bits=8,
            order=order,
        )


def _runs(part: Part, groups: torch.Tensor, num_rows: int) -> list[tuple[int, int]]:
    """The width and the rows of words of each group."""
    described = (groups.int() & 0xFFFF).tolist()
    widths, starts = described[::2], [*described[1::2], num_rows]
    rows = [stop - start for start, stop in itertools.pairwise(starts)]
    is_whole = all(bits in _BITS and count > 0 and count % bits == 0 for bits, count in zip(widths, rows, strict=False))
    if not widths or len(widths) != len(rows) or starts[0] != 0 or not is_whole:
        raise InvalidArgumentError(f"{part.name}.q_groups do not describe the {num_rows} rows of its q_weight")
    return list(zip(widths, rows, strict=True))


def _codes(packed: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
    """[rows of words, outputs] -> uint8 [outputs, inputs]"""
    parts = packed.split([rows for _, rows in runs])
    return torch.cat(
        [
            unpack_words(rows.t(), bits, rows.shape[0] * _WORD // bits)
            for (bits, _), rows in zip(runs, parts, strict=True)
        ],
        dim=1,
    )


def _scales(tensors: LinearTensors, part: Part, num_groups: int, outputs: int) -> torch.Tensor:
    """float32 [outputs, groups]: squares of 1 to 16, in parts of the largest of their group."""
    steps = unpack_words(tensors.stored(part, "q_scale", (num_groups, -(-outputs // 8)), (torch.int32,)), 4, outputs)
    largest = tensors.stored(part, "q_scale_max", (num_groups,), (torch.float16,)).float() / 256
    return ((steps.float() + 1).square() * largest[:, None]).t().contiguous()
