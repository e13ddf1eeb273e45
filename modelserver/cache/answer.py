"""A cached answer: an immutable copy of the model's response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelserver.cache.key import tensor_size
from modelserver.core.response import InferResponse, ParameterValue
from modelserver.core.tensor import Tensor

# The objects around the numbers of one tensor, in bytes, roughly.
_TENSOR_OVERHEAD = 256


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The outputs and parameters of a response; its tensors are read-only."""

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, ParameterValue] | None = None

    @classmethod
    def of(cls, response: InferResponse) -> CachedAnswer:
        """Copied, because outputs may be views of larger memory, or of memory that other code writes to."""
        outputs = tuple([Tensor(tensor.name, tensor.datatype, tensor.data.copy()) for tensor in response.outputs])
        for tensor in outputs:
            tensor.data.flags.writeable = False
        return cls(outputs, None if response.parameters is None else dict(response.parameters))

    @property
    def num_bytes(self) -> int:
        """Its memory in bytes, without Python's overhead for parameters."""
        return sum(tensor_size(tensor) + _TENSOR_OVERHEAD for tensor in self.outputs)

    def response(self) -> InferResponse:
        """A response of its own for one request, with the same tensors."""
        return InferResponse(outputs=list(self.outputs), parameters=self.parameters)


def response_size(response: InferResponse) -> int:
    """The size of a copy of the response in bytes, without BYTES elements."""
    return sum(tensor.data.nbytes for tensor in response.outputs)
