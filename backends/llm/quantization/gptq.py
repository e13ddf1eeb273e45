"""GPTQ, as AutoGPTQ and GPTQModel store it: integers packed along the inputs, with or without act-order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from modelserver.backend import InvalidArgumentError

from ..models.linear_tensors import FLOATS, LinearTensors, Part
from .bits import unpack_words
from .config_fields import checkpoints_only, fits, integer, one_of
from .quantized_weight import QuantizedWeight
from .stored import StoredScheme, group_length, sorted_by_group

_BITS = (2, 3, 4, 8)
_WORD = 32


@dataclass(frozen=True, slots=True)
class _Layout:
    bits: int
    group_size: int


class Gptq(StoredScheme):
    """`zeros_offset`: what is added to stored zero points, which the first version of the format stores less one."""

    def __init__(self, layout: _Layout, zeros_offset: int, rules: Mapping[str, Mapping[str, Any]]) -> None:
        self._layout = layout
        self._zeros_offset = zeros_offset
        self._rules = rules

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        config = checkpoints_only("gptq", config)
        form = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq", method="gptq")
        one_of(config, "pack_dtype", ("int32",), default="int32", method="gptq")
        layout = _Layout(
            integer(config, "bits", _BITS, method="gptq"), integer(config, "group_size", default=-1, method="gptq")
        )
        rules = config.get("dynamic") or {}
        if not isinstance(rules, Mapping):
            raise InvalidArgumentError("quantization_config.dynamic must be an object of rules for modules")
        return cls(layout, 1 if form == "gptq" else 0, rules)

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        return tensors.has(part, "qweight") or not tensors.has(part, "weight")

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        layout = self._layout_of(tensors.checkpoint.module(part.name) or part.name)
        bits, group = layout.bits, group_length(part, layout.group_size)
        inputs, outputs = part.num_inputs, part.num_outputs
        groups = inputs // group
        packed = tensors.stored(part, "qweight", (_words(inputs, bits), outputs), (torch.int32,))
        scales = tensors.stored(part, "scales", (groups, outputs), FLOATS)
        zeros = tensors.stored(part, "qzeros", (groups, _words(outputs, bits)), (torch.int32,))
        weight = QuantizedWeight(
            codes=unpack_words(packed.t(), bits, inputs),
            scales=scales.t().contiguous(),
            group=group,
            bits=bits,
            zeros=(unpack_words(zeros, bits, outputs) + self._zeros_offset & (1 << bits) - 1).t().contiguous(),
        )
        if not tensors.has(part, "g_idx"):
            return weight
        group_of = tensors.stored(part, "g_idx", (inputs,), (torch.int32, torch.int64))
        return sorted_by_group(weight, group_of, f"{part.name}.g_idx")

    def _layout_of(self, name: str) -> _Layout:
        """That of the first rule of `dynamic` that fits the module's name, else the config's own."""
        for pattern, changes in self._rules.items():
            if pattern.startswith("-:") or not fits(pattern.removeprefix("+:"), name):
                continue
            bits, group_size = (
                changes.get("bits", self._layout.bits),
                changes.get("group_size", self._layout.group_size),
            )
            return _Layout(
                integer({"bits": bits}, "bits", _BITS, method="gptq"),
                integer({"group_size": group_size}, "group_size", method="gptq"),
            )
        return self._layout


def _words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)
