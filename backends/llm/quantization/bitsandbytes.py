"""bitsandbytes: 8 bits with a scale for each output, and nf4 or fp4, whose values no machine multiplies as they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Self

import torch

from modelserver.backend import InvalidArgumentError

from ..models.linear import Linear, float_linear
from ..models.linear_tensors import FLOATS, LinearTensors, Part
from .bits import unpack_nibbles
from .config_fields import checkpoints_only
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme

_STATE = "weight.quant_state.bitsandbytes__{}"
_KINDS = ("nf4", "fp4")
_MAX_STATE_BYTES = 1 << 16


class BitsAndBytes(StoredScheme):
    """Weights of 4 bits become floats when they are loaded; those of 8 bits stay as they are."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        checkpoints_only("bitsandbytes", config)
        return cls()

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "SCB") or tensors.has(part, "weight.absmax")

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        """Of a part in 8 bits."""
        codes = tensors.stored(part, "weight", (part.num_outputs, part.num_inputs), (torch.int8,))
        largest = tensors.stored(part, "SCB", (part.num_outputs,), FLOATS)
        return QuantizedWeight(codes=codes, scales=largest.float()[:, None] / 127, group=part.num_inputs, bits=8)

    def check(self, tensors: LinearTensors) -> None:
        for part in tensors.parts:
            if self.is_quantized(tensors, part):
                self._dense(tensors, part)
            else:
                tensors.check_floats(part)

    def linear(self, tensors: LinearTensors) -> Linear:
        if all(tensors.has(part, "SCB") for part in tensors.parts):
            return super().linear(tensors)
        dense = [
            tensors.share(part, self._dense(tensors, part), outputs=0, inputs=1).to(tensors.dtype)
            for part in tensors.parts
        ]
        return float_linear(tensors.placed(torch.cat(dense)), tensors.bias())

    def _dense(self, tensors: LinearTensors, part: Part) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        if tensors.has(part, "SCB"):
            return self.read(tensors, part).dequantized()
        kind = next((kind for kind in _KINDS if tensors.has(part, _STATE.format(kind))), _KINDS[0])
        state = _state(tensors, part, _STATE.format(kind))
        shape, block = (part.num_outputs, part.num_inputs), _length(state, "blocksize", part)
        if list(state.get("shape", ())) != list(shape):
            raise InvalidArgumentError(
                f"{part.name} is {state.get('shape')} by its quant_state, expected {list(shape)}"
            )
        count = math.prod(shape)
        packed = tensors.stored(part, "weight", (-(-count // 2), 1), (torch.uint8,)).flatten()
        table = tensors.stored(part, "weight.quant_map", (16,), (torch.float32,))
        # The high half of a byte is the first: swapped, since the low one is read first.
        codes = unpack_nibbles(packed << 4 | packed >> 4)[:count]
        scales = _scales(tensors, part, state, -(-count // block))
        padded = torch.nn.functional.pad(table[codes.long()], (0, -count % block))
        return padded.view(-1, block).mul_(scales[:, None]).flatten()[:count].view(shape)


def _scales(tensors: LinearTensors, part: Part, state: Mapping[str, Any], count: int) -> torch.Tensor:
    """One for each block; they may be quantized themselves, in blocks of their own."""
    if not tensors.has(part, "weight.nested_absmax"):
        return tensors.stored(part, "weight.absmax", (count,), (torch.float32,))
    codes = tensors.stored(part, "weight.absmax", (count,), (torch.uint8,))
    block = _length(state, "nested_blocksize", part)
    table = tensors.stored(part, "weight.nested_quant_map", (256,), (torch.float32,))
    largest = tensors.stored(part, "weight.nested_absmax", (-(-count // block),), (torch.float32,))
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float):
        raise InvalidArgumentError(f"nested_offset of {part.name}'s quant_state must be a number, got {offset!r:.80}")
    return table[codes.long()] * largest.repeat_interleave(block)[:count] + offset


def _state(tensors: LinearTensors, part: Part, suffix: str) -> Mapping[str, Any]:
    stored = tensors.vector(part, suffix, (torch.uint8,), longest=_MAX_STATE_BYTES)
    try:
        state = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{part.name}.{suffix} is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise InvalidArgumentError(f"{part.name}.{suffix} must hold a JSON object")
    return state


def _length(state: Mapping[str, Any], key: str, part: Part) -> int:
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{key} of {part.name}'s quant_state must be a positive integer, got {value!r:.80}")
    return value
