"""AWQ, as AutoAWQ stores it: 4 bits packed along the outputs (gemm) or along the inputs (gemv)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from ..models.linear_tensors import FLOATS, LinearTensors, Part
from .bits import unpack_words
from .config_fields import checkpoints_only, integer, one_of
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme, group_length

_BITS = 4
_PER_WORD = 8
# Where the gemm layout puts the eight outputs of a word: output i is the nibble _PLACES[i].
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(StoredScheme):
    def __init__(self, group_size: int, *, is_gemv: bool, has_zeros: bool) -> None:
        self._group_size = group_size
        self._is_gemv = is_gemv
        self._has_zeros = has_zeros

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        """`w_bit` and `q_group_size` are the names of the format's first configs."""
        config = checkpoints_only("awq", config)
        integer({"bits": config.get("bits", config.get("w_bit"))}, "bits", (_BITS,), method="awq")
        sizes = {"group_size": config.get("group_size", config.get("q_group_size", -1))}
        version = one_of(config, "version", ("gemm", "gemv"), default="gemm", method="awq")
        return cls(
            integer(sizes, "group_size", method="awq"),
            is_gemv=version == "gemv",
            has_zeros=bool(config.get("zero_point", True)),
        )

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "qweight") or not tensors.has(part, "weight")

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        return self._read_gemv(tensors, part) if self._is_gemv else self._read_gemm(tensors, part)

    def _read_gemm(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        inputs, outputs = part.num_inputs, part.num_outputs
        group = group_length(part, self._group_size)
        groups = inputs // group
        words = -(-outputs // _PER_WORD)
        packed = tensors.stored(part, "qweight", (inputs, words), (torch.int32,))
        scales = tensors.stored(part, "scales", (groups, outputs), FLOATS)
        zeros = torch.full((outputs, groups), 8, dtype=torch.uint8)
        if self._has_zeros:
            zeros = _by_outputs(tensors.stored(part, "qzeros", (groups, words), (torch.int32,)))[:outputs]
        codes = _by_outputs(packed)[:outputs]
        return QuantizedWeight(codes=codes, scales=scales.t().contiguous(), zeros=zeros, group=group, bits=_BITS)

    def _read_gemv(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        inputs, outputs = part.num_inputs, part.num_outputs
        group = group_length(part, self._group_size)
        groups = inputs // group
        width = _gemv_zero_words(groups, self._group_size)
        packed = tensors.stored(part, "qweight", (outputs, -(-inputs // _PER_WORD)), (torch.int32,))
        zeros = tensors.stored(part, "qzeros", (outputs, width), (torch.int32,))
        scales = tensors.stored(part, "scales", (outputs, width * _PER_WORD), FLOATS)
        return QuantizedWeight(
            codes=unpack_words(packed, _BITS, inputs),
            scales=scales[:, :groups].contiguous(),
            zeros=unpack_words(zeros, _BITS, groups).contiguous(),
            group=group,
            bits=_BITS,
        )


def _by_outputs(packed: torch.Tensor) -> torch.Tensor:
    """[rows, outputs / 8] -> [outputs, rows]."""
    nibbles = unpack_words(packed, _BITS, packed.shape[1] * _PER_WORD).unflatten(1, (-1, _PER_WORD))
    return nibbles[:, :, list(_PLACES)].flatten(1).t().contiguous()


def _gemv_zero_words(groups: int, group_size: int) -> int:
    """Words that hold a row's zero points: more than it has groups for, since the kernel reads them by the four."""
    multiple = 1 if group_size in (-1, 128) or group_size > 128 else 128 // group_size
    words = -(-groups // _PER_WORD)
    return -(-words // multiple) * multiple
