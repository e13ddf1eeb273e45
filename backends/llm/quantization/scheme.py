"""The seam for weights that are not plain floats: a scheme makes each linear layer of a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from modelserver.backend import UnsupportedError

from ..kernels import has_fast_packed_kernels, multiplies_floats_fastest, packed_kernels_for
from ..models.linear import (
    DenseEmbedding,
    GroupedLinear,
    HeadedEmbedding,
    JoinedLinear,
    Linear,
    TokenEmbedding,
    float_linear,
    packed_embedding,
)
from ..models.linear_tensors import LinearTensors
from ..models.packed_matrix import (
    PackedMatrix,
    PackedMatrixEmbedding,
    PackedMatrixLinear,
    grouped_linears,
    pack_floats,
)


class Scheme(ABC):
    """How the weights of one network are stored and multiplied; made once from the checkpoint's `quantization_config`.

    It sees a layer's tensors as the checkpoint stores them (`qweight`, `scales`, ...): `LinearTensors` has their full
    names, the parts that are fused into one layer, and cuts tensors to this rank's share.
    """

    # Whether it can quantize weights that are stored in floats: by the option `quantization`.
    is_online: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        """Of `quantization_config`; None: the weights are floats, to be quantized now.

        UnsupportedError for a variant that this scheme does not read.
        """

    @property
    def has_codes(self) -> bool:
        """Whether layers multiply codes. On a CPU these products are in float32, whatever the network's datatype."""
        return True

    @abstractmethod
    def linear(self, tensors: LinearTensors) -> Linear:
        """A layer that it does not skip. UnsupportedError or InvalidArgumentError names the tensor that is wrong."""

    def skips(self, name: str) -> bool:  # noqa: ARG002 - for those that override it
        """Whether the checkpoint has this module in floats; `name` is the file's own (`model.layers.0.mlp.up_proj`)."""
        return False

    def grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        """The same layer of all experts of a mixture, none of which it skips."""
        return grouped_linears([self.linear(tensors) for tensors in experts], experts[0].device)

    def dense(self, tensors: LinearTensors) -> torch.Tensor:
        """The matrix [outputs, inputs] of one part in floats, which a network multiplies by in a way of its own."""
        if self.is_online or all(self.skips(name) for name in tensors.names):
            return tensors.weight()
        unit = torch.eye(tensors.parts[0].num_inputs, dtype=tensors.dtype, device=tensors.device)
        return self.make_linear(tensors)(unit, None).t()

    def embedding(self, tensors: LinearTensors) -> TokenEmbedding:
        """Of floats, unless a scheme has them in another form."""
        weight = tensors.stored_weight()
        if _is_packed(weight, tensors.dtype):
            return PackedMatrixEmbedding(_packed(weight), tensors.dtype)
        return DenseEmbedding(weight.to(tensors.dtype))

    def tied_head(self, tensors: LinearTensors, embedding: TokenEmbedding) -> Linear:
        """The head of a network that uses its embedding for it: of the same memory, if that has a form for both."""
        if isinstance(embedding, HeadedEmbedding):
            return embedding.head()
        return self.make_linear(tensors)

    def transformers_options(self) -> dict[str, Any]:
        """What transformers' from_pretrained needs besides, where a network of its own reads such weights."""
        return {}

    def make_linear(self, tensors: LinearTensors) -> Linear:
        """Any layer: parts that are skipped are floats, beside parts that are not."""
        skipped = [self.skips(name) for name in tensors.names]
        if all(skipped):
            return stored_float_linear(tensors)
        if any(skipped):
            return JoinedLinear([self.make_linear(part) for part in tensors.each()])
        return self.linear(tensors)

    def make_grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        if any(self.skips(name) for tensors in experts for name in tensors.names):
            return grouped_linears([self.make_linear(tensors) for tensors in experts], experts[0].device)
        return self.grouped(experts)


class FloatScheme(Scheme):
    """Weights in floats, in the form that the device multiplies fastest."""

    is_online = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        if config is not None:
            raise UnsupportedError("quantization 'none' was asked for, but the checkpoint's weights are quantized")
        return cls()

    @property
    def has_codes(self) -> bool:
        return False

    def linear(self, tensors: LinearTensors) -> Linear:
        return stored_float_linear(tensors)

    def grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        """On a CPU by one call of the kernels for all experts: calls of oneDNN for each cost more than they save."""
        first = experts[0]
        if first.dtype is not torch.float32 or not has_fast_packed_kernels(first.device):
            return super().grouped(experts)
        packed = [PackedMatrixLinear(_packed(each.stored_weight()), each.bias()) for each in experts]
        return grouped_linears(packed, first.device)


def stored_float_linear(tensors: LinearTensors) -> Linear:
    """A layer of floats in the form that the device multiplies fastest. On a CPU whose networks compute in float32,
    weights that are stored in 16 bits stay so: they are read in half the time, and have the same values.
    """
    weight = tensors.stored_weight()
    if _is_packed(weight, tensors.dtype):
        return PackedMatrixLinear(_packed(weight), tensors.bias())
    return float_linear(weight.to(tensors.dtype), tensors.bias())


def multiplied_embedding(embedding: TokenEmbedding) -> TokenEmbedding:
    """On a CPU in a form that the head multiplies by as well: in oneDNN's order, or in our own of 16 bits.

    In ours one row takes as long, 8 rows 1.4x and 32 rows 2.6x of oneDNN's time (measured: AVX-512, 151,936 x 1,024).
    """
    if not isinstance(embedding, DenseEmbedding):
        return embedding
    packed = packed_embedding(embedding.weight)
    if packed is not None or embedding.weight.dtype not in (torch.bfloat16, torch.float16):
        return packed or embedding
    if not has_fast_packed_kernels(embedding.weight.device):
        return embedding
    return PackedMatrixEmbedding(_packed(embedding.weight), embedding.weight.dtype)


def _is_packed(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight in floats of a network of `dtype` is multiplied by our kernels."""
    if weight.dtype is not dtype:
        return has_fast_packed_kernels(weight.device)
    return dtype is torch.float32 and multiplies_floats_fastest(weight.device)


def _packed(weight: torch.Tensor) -> PackedMatrix:
    kernels = packed_kernels_for(weight.device)
    assert kernels is not None, "it was asked for before"
    return pack_floats(weight, kernels)
