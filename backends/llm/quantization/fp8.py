"""FP8 as Hugging Face, DeepSeek and FBGEMM store it, and the formats of NVIDIA's ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..models.linear_tensors import LinearTensors, Part
from .config_fields import checkpoints_only, one_of
from .quantized_weight import QuantizedWeight
from .small_floats import read_float8, read_nvfp4
from .stored import StoredScheme

_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_MODELOPT_BLOCK = (128, 128)


class StoredFp8(StoredScheme):
    """`block`: outputs and inputs that share a scale. Scales for activations are not read."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        self._block = block

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        config = checkpoints_only("fp8", config)
        one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3", method="fp8")
        return cls(_block(config.get("weight_block_size")))

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return any(tensors.has(part, suffix) for suffix in _SCALE_NAMES)

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        """By either name, a scale is what codes are multiplied with."""
        suffix = next(suffix for suffix in _SCALE_NAMES if tensors.has(part, suffix))
        return replace(read_float8(tensors, part, suffix, block=self._block), activations=torch.float8_e4m3fn)


class ModelOpt(StoredScheme):
    """Each module is in the form that its tensors show, since ModelOpt mixes them."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        config = checkpoints_only("modelopt", config)
        nested = config.get("quantization")
        described = nested if isinstance(nested, Mapping) else config
        known = ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "nvfp4", "mixed_precision")
        one_of(described, "quant_algo", known, default="unnamed", method="modelopt")
        return cls()

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "weight_scale")

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        if tensors.has(part, "pre_quant_scale"):
            raise UnsupportedError(f"{part.name}.pre_quant_scale, a scale for inputs, is not supported")
        if tensors.has(part, "weight_scale_2"):
            return read_nvfp4(tensors, part, "weight", "weight_scale_2", is_divisor=False)
        shape = tensors.checkpoint.shape(f"{part.name}.weight_scale")
        is_blocked = len(shape) == 4 or (len(shape) == 2 and shape[1] > 1)
        weight = read_float8(tensors, part, "weight_scale", block=_MODELOPT_BLOCK if is_blocked else None)
        return replace(weight, activations=torch.float8_e4m3fn)


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise InvalidArgumentError(
            f"quantization_config.weight_block_size of fp8 must be two lengths, or null, got {value!r:.80}"
        )
    return value[0], value[1]
