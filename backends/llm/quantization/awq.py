"""AWQ, as AutoAWQ stores it: 4 bits packed along the outputs (gemm), along the inputs (gemv), or both (gemv_fast)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from modelserver.backend import UnsupportedError

from ..models.linear_tensors import FLOATS, LinearTensors, Part
from .bits import unpack_nibbles, unpack_words
from .config_fields import checkpoints_only, integer, one_of
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme, group_length

_BITS = 4
_PER_WORD = 8
# Of a block of gemv_fast.
_FAST_OUTPUTS, _FAST_INPUTS = 4, 64
# Where the gemm layout puts the eight outputs of a word: output i is the nibble _PLACES[i].
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(StoredScheme):
    def __init__(self, group_size: int, version: str, *, has_zeros: bool) -> None:
        self._group_size = group_size
        self._version = version
        self._has_zeros = has_zeros

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        """`w_bit` and `q_group_size` are the names of the format's first configs."""
        config = checkpoints_only("awq", config)
        integer({"bits": config.get("bits", config.get("w_bit"))}, "bits", (_BITS,), method="awq")
        sizes = {"group_size": config.get("group_size", config.get("q_group_size", -1))}
        version = one_of(config, "version", ("gemm", "gemv", "gemv_fast"), default="gemm", method="awq")
        return cls(
            integer(sizes, "group_size", method="awq"),
            version,
            has_zeros=bool(config.get("zero_point", True)),
        )

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "qweight") or not tensors.has(part, "weight")

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        match self._version:
            case "gemv":
                return self._read_gemv(tensors, part)
            case "gemv_fast":
                return self._read_gemv_fast(tensors, part)
        return self._read_gemm(tensors, part)

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

    def _read_gemv_fast(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        """Four inputs of an output in a word, 64 inputs of four outputs in a block; zeros are times their scales."""
        inputs, outputs = part.num_inputs, part.num_outputs
        if inputs % _FAST_INPUTS or outputs % _FAST_OUTPUTS:
            raise UnsupportedError(
                f"{part.name} of {outputs} outputs and {inputs} inputs is not supported as gemv_fast: expected "
                f"multiples of {_FAST_OUTPUTS} and {_FAST_INPUTS}"
            )
        group = group_length(part, self._group_size)
        groups = inputs // group
        grid = (_gemv_zero_words(groups, self._group_size) * _PER_WORD, outputs)
        packed = tensors.stored(part, "qweight", (outputs // _FAST_OUTPUTS, inputs), (torch.int16,))
        scales, added = (tensors.stored(part, name, grid, FLOATS)[:groups].t() for name in ("scales", "qzeros"))
        nibbles = unpack_nibbles(packed.view(torch.uint8))
        blocks = nibbles.unflatten(1, (-1, _FAST_OUTPUTS, _FAST_INPUTS)).transpose(1, 2)
        # Of 32 inputs, pairs of all four eights are side by side; in eight values the first of all pairs come first.
        eights = blocks.reshape(outputs, -1, 4, 2, 4).transpose(3, 4)
        codes = eights.transpose(2, 3).reshape(outputs, inputs)
        return QuantizedWeight(
            codes=codes, scales=scales.contiguous(), mins=-added.contiguous(), group=group, bits=_BITS
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
