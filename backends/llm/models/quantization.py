"""The one seam for weights that are not plain floats: a method by name makes each linear layer of a network.

A method sees a layer's tensors as the checkpoint stores them (`qweight`, `scales`, ...), parts that are fused into one
layer side by side, and gives a `Linear`. GPTQ, AWQ, FP8 and GGUF plug in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from modelserver.backend import UnsupportedError

from .int8_linear import Int8Linear
from .linear import Linear, make_linear


class LinearTensors(Protocol):
    """What the checkpoint has of one linear layer, cut to this rank's share."""

    def weight(self) -> torch.Tensor:
        """[out_features, in_features] of all parts, in the network's dtype on its device."""
        ...

    def bias(self) -> torch.Tensor | None: ...

    def stored(self, suffix: str) -> list[torch.Tensor]:
        """Tensor `suffix` of each part as it is in the file, whole."""
        ...


QuantizationMethod = Callable[[LinearTensors], Linear]


def _plain(tensors: LinearTensors) -> Linear:
    return make_linear(tensors.weight(), tensors.bias())


def _int8(tensors: LinearTensors) -> Linear:
    return Int8Linear(tensors.weight(), tensors.bias())


_METHODS: dict[str, QuantizationMethod] = {"none": _plain, "int8": _int8}
# Which of them make quantized weights from plain ones; the others need a checkpoint that has them.
_ONLINE = frozenset({"none", "int8"})


def quantization_method(asked: str | None, config: Mapping[str, Any]) -> QuantizationMethod:
    """Of the option `quantization` and config.json's `quantization_config`. UnsupportedError names what there is."""
    stored = config.get("quantization_config")
    name = str(stored.get("quant_method", "unnamed")) if isinstance(stored, Mapping) else None
    if name is not None and asked not in (None, name):
        raise UnsupportedError(f"quantization {asked!r} was asked for, but the checkpoint's weights are {name!r}")
    name = name or asked or "none"
    if name not in _METHODS or (stored is not None and name in _ONLINE):
        known = ", ".join(sorted(_METHODS.keys() - {"none"}))
        raise UnsupportedError(f"quantization {name!r} is not supported; on plain weights there is: {known}")
    return _METHODS[name]
