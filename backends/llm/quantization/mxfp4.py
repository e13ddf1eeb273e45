"""MXFP4 as gpt-oss stores its experts, which run on transformers' network (`models/mxfp4_experts.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from modelserver.backend import UnsupportedError

from ..models.linear import Linear
from ..models.linear_tensors import LinearTensors
from .scheme import Scheme


class Mxfp4(Scheme):
    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        if config is None:
            raise UnsupportedError("quantization 'mxfp4' is read from checkpoints; plain weights are not made into it")
        return cls()

    def linear(self, tensors: LinearTensors) -> Linear:
        raise UnsupportedError(f"quantization 'mxfp4' is not supported here, and {tensors.names[0]} has it")

    def transformers_options(self) -> dict[str, Any]:
        """Where the experts are not kept packed, they become what the other weights are: transformers' kernels for them
        need packages of their own, and it would ask for these.
        """
        from transformers.utils.quantization_config import Mxfp4Config

        return {"quantization_config": Mxfp4Config(dequantize=True)}
