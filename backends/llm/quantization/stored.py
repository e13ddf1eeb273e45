"""The scheme for checkpoints whose modules are stored in codes and scales: each format reads one matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..models.linear import GroupedLinear, JoinedLinear, Linear, TokenEmbedding
from ..models.linear_tensors import LinearTensors, Part, Split
from ..models.packed_matrix import grouped_linears
from .quantized_linear import quantized_embedding, quantized_linear
from .quantized_weight import QuantizedWeight
from .scheme import Scheme, stored_float_linear


class StoredScheme(Scheme):
    """Reads a module in its format if the checkpoint has the tensors of a quantized module, else as floats."""

    @abstractmethod
    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        """Whether a part is stored in this format; if not, it is stored in floats."""

    @abstractmethod
    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        """The whole of a part. InvalidArgumentError or UnsupportedError names the tensor that is wrong."""

    def linear(self, tensors: LinearTensors) -> Linear:
        return quantized_linear([self._share(tensors, part) for part in tensors.parts], tensors.bias())

    def dense(self, tensors: LinearTensors) -> torch.Tensor:
        (part,) = tensors.parts
        if not self.is_quantized(tensors, part):
            return tensors.weight()
        return self._share(tensors, part).dequantized().to(tensors.dtype)

    def embedding(self, tensors: LinearTensors) -> TokenEmbedding:
        (part,) = tensors.parts
        if not self.is_quantized(tensors, part):
            return super().embedding(tensors)
        return quantized_embedding(self._share(tensors, part), tensors.dtype)

    def make_linear(self, tensors: LinearTensors) -> Linear:
        quantized = [self.is_quantized(tensors, part) for part in tensors.parts]
        if not any(quantized):
            return stored_float_linear(tensors)
        if not all(quantized):
            return JoinedLinear([self.make_linear(part) for part in tensors.each()])
        return self.linear(tensors)

    def make_grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        if all(self.is_quantized(tensors, part) for tensors in experts for part in tensors.parts):
            return self.grouped(experts)
        return grouped_linears([self.make_linear(tensors) for tensors in experts], experts[0].device)

    def check(self, tensors: LinearTensors) -> None:
        """Whether all parts can be read, of a checkpoint whose tensors may be without values. Raises as `read`."""
        for part in tensors.parts:
            if self.is_quantized(tensors, part):
                share(tensors, part, self.read(tensors, part))
            else:
                tensors.check_floats(part)

    def _share(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        return share(tensors, part, self.read(tensors, part)).to(tensors.device)


def share(tensors: LinearTensors, part: Part, weight: QuantizedWeight) -> QuantizedWeight:
    """This rank's share of a part. UnsupportedError, which names the part, if a group would lie on two ranks."""
    if tensors.rank.size == 1 or tensors.split is Split.WHOLE:
        return weight
    if tensors.split is Split.OUTPUTS:
        return weight.rows(tensors.share(part, torch.arange(part.num_outputs), outputs=0))
    inputs = tensors.rank.share(part.num_inputs, f"the inputs of {part.name}")
    if weight.order is None and weight.group >= weight.num_inputs:
        return replace(weight, codes=weight.codes[:, inputs], group=inputs.stop - inputs.start)
    try:
        return weight.inputs(inputs.start, inputs.stop)
    except (InvalidArgumentError, UnsupportedError) as error:
        raise UnsupportedError(
            f"tensor_parallel_size {tensors.rank.size} is not supported for {part.name}: {error.message}"
        ) from None


def group_length(part: Part, group_size: int) -> int:
    """How many inputs share a scale; -1 stands for all. UnsupportedError for a last group that is shorter."""
    if group_size == -1:
        return part.num_inputs
    if group_size < 1 or part.num_inputs % group_size:
        raise UnsupportedError(
            f"groups of {group_size} inputs are not supported for {part.name}, which has {part.num_inputs} inputs"
        )
    return group_size


def sorted_by_group(weight: QuantizedWeight, group_of: torch.Tensor, name: str) -> QuantizedWeight:
    """Of a weight whose columns are the inputs in their own order; input i is of group `group_of[i]`.

    InvalidArgumentError unless all groups are of one length.
    """
    length, groups = weight.group, weight.scales.shape[1]
    if torch.equal(group_of, torch.arange(weight.num_inputs, dtype=group_of.dtype) // length):
        return weight
    is_known = bool(((group_of >= 0) & (group_of < groups)).all())
    if not is_known or not bool((group_of.long().bincount(minlength=groups) == length).all()):
        raise InvalidArgumentError(f"{name} must place {length} inputs in each of {groups} groups, and does not")
    order = group_of.long().argsort(stable=True)
    return replace(weight, codes=weight.codes[:, order], order=order)
