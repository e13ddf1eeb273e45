"""torchao, as transformers saves it in safetensors: integers of 8 and 4 bits and e4m3, scaled by outputs or groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..models.linear_tensors import FLOATS, LinearTensors, Part
from .bits import unpack_nibbles
from .config_fields import checkpoints_only
from .quantized_weight import QuantizedWeight
from .small_floats import FLOAT8
from .stored import StoredScheme

_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_ROW_FACTORS = "_weight_act_pre_scale"
_INTEGERS = (torch.int8, torch.int16, torch.int32)


class TorchAo(StoredScheme):
    """Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor, and Int4Tensor (its packing format `plain`).

    The other formats of 4 bits are laid out for one device.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        checkpoints_only("torchao", config)
        return cls()

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, _CODES)

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        shape = (part.num_outputs, part.num_inputs)
        codes = tensors.stored(part, _CODES)
        if codes.dtype not in (torch.int8, *FLOAT8):
            raise UnsupportedError(
                f"{part.name}.{_CODES} is packed ({codes.dtype} {list(codes.shape)}); of torchao's tensors, Int4Tensor "
                "(plain), Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor are supported"
            )
        if tensors.has(part, _ROW_FACTORS):
            raise UnsupportedError(f"{part.name}.{_ROW_FACTORS}: factors of rows are not supported")
        if codes.shape == (part.num_outputs, part.num_inputs // 2) and codes.dtype is torch.int8:
            return _plain_int4(tensors, part, codes)
        if codes.shape != shape:
            raise InvalidArgumentError(
                f"{part.name}.{_CODES} has the shape {list(codes.shape)}, expected {list(shape)}"
            )
        scales = _grid(part, _SCALE, tensors.stored(part, _SCALE, None, FLOATS))
        zeros = None
        if tensors.has(part, _ZERO):
            zeros = _grid(part, _ZERO, tensors.stored(part, _ZERO, None, _INTEGERS))
            if zeros.shape != scales.shape:
                raise InvalidArgumentError(f"{part.name}.{_ZERO} must have the shape of {_SCALE}")
        group = part.num_inputs // scales.shape[1]
        return QuantizedWeight(codes=codes, scales=scales, zeros=zeros, group=group, bits=8)


def _plain_int4(tensors: LinearTensors, part: Part, pairs: torch.Tensor) -> QuantizedWeight:
    """Two signed codes in a byte, the first in its low half; scales and what is added to them are [groups, outputs]."""
    scales, added = (
        _grid(part, suffix, tensors.stored(part, suffix, None, FLOATS).t().contiguous()) for suffix in (_SCALE, _ZERO)
    )
    if added.shape != scales.shape:
        raise InvalidArgumentError(f"{part.name}.{_ZERO} must have the shape of {_SCALE}")
    return QuantizedWeight(
        codes=unpack_nibbles(pairs.view(torch.uint8)) ^ 8,
        zeros=torch.full(scales.shape, 8, dtype=torch.uint8),
        scales=scales,
        mins=-added,
        group=part.num_inputs // scales.shape[1],
        bits=4,
    )


def _grid(part: Part, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
    """One for all, for each output, or for each output and group -> [outputs, groups]."""
    outputs = part.num_outputs
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(outputs, 1).contiguous()
    if tensor.shape == (outputs,):
        return tensor[:, None]
    if tensor.dim() == 2 and tensor.shape[0] == outputs and part.num_inputs % max(tensor.shape[1], 1) == 0:
        return tensor
    raise InvalidArgumentError(
        f"{part.name}.{suffix} has the shape {list(tensor.shape)}, expected [{outputs}, a divisor of {part.num_inputs}]"
    )
