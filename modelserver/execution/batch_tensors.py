"""Batches of requests of different shapes: flat inputs, inputs that describe the shapes, and flat outputs.

The fields `allow_ragged_batch`, `is_shape_tensor`, `batch_input` and `batch_output` of a config, for instances that see
whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from modelserver.backend import Array
from modelserver.config.schema import BatchInputKind, ModelConfig
from modelserver.core.request import InFlightRequest
from modelserver.errors import InternalError

Shape = tuple[int, ...]
# The numbers of one batch input, from the shapes of its source in each request.
Numbers = Callable[[Sequence[Shape]], Array]


class BatchTensors:
    """The batch inputs and outputs of one model. Stateless, so all workers share it."""

    def __init__(self, config: ModelConfig) -> None:
        self._model_name = config.name
        is_batched = config.max_batch_size > 0
        self.ragged = frozenset(spec.name for spec in config.input if spec.allow_ragged_batch and is_batched)
        # Shape tensors: equal in all requests of a batch, which is a condition for sharing one.
        self.shared = frozenset(spec.name for spec in config.input if spec.is_shape_tensor)
        self._inputs: list[tuple[str, str, Numbers, np.dtype[np.generic]]] = []
        for batch_input in config.batch_input:
            assert batch_input.data_type is not None, "a validated batch input has a datatype"
            numbers, dtype = _NUMBERS[batch_input.kind], batch_input.data_type.numpy
            (source,) = batch_input.source_input
            self._inputs += [(target, source, numbers, dtype) for target in batch_input.target_name]
        dims = {output.name: tuple(output.dims) for output in config.output}
        self._outputs = {
            target: (batch_output.source_input[0], dims[target])
            for batch_output in config.batch_output
            for target in batch_output.target_name
        }

    @property
    def is_needed(self) -> bool:
        return bool(self.ragged or self.shared or self._inputs or self._outputs)

    def flatten(self, requests: Sequence[InFlightRequest], name: str) -> Array:
        """A ragged input of the batch: the elements of all requests, one after the other."""
        flat = [request.inputs[name].data.reshape(-1) for request in requests]
        return flat[0] if len(flat) == 1 else np.concatenate(flat)

    def add_inputs(self, requests: Sequence[InFlightRequest], inputs: dict[str, Array]) -> None:
        """Add the batch inputs; those whose source, an optional input, is absent stay absent too."""
        for target, source, numbers, dtype in self._inputs:
            if source in requests[0].inputs:
                shapes = [request.inputs[source].data.shape for request in requests]
                inputs[target] = numbers(shapes).astype(dtype)

    def is_scattered(self, name: str) -> bool:
        """Whether an output is split by the shapes of an input, and not by rows."""
        return name in self._outputs

    def scatter(self, name: str, array: Array, requests: Sequence[InFlightRequest]) -> list[Array]:
        """Each request's part of an output: its share of the elements, in its shape.

        The shape is the output's dims, with the sizes of the request's input where they are variable. Raises
        InternalError when the parts do not make up the whole.
        """
        source, dims = self._outputs[name]
        shapes: list[Shape] = []
        for request in requests:
            given = request.inputs[source].data.shape
            sizes = [given[place] if dim == -1 and place < len(given) else dim for place, dim in enumerate(dims, 1)]
            shapes.append((given[0], *sizes))
        counts = [prod(shape) for shape in shapes]
        if sum(counts) != array.size:
            raise InternalError(
                f"model '{self._model_name}': output '{name}' has {array.size} elements, expected {sum(counts)}, "
                f"the sum for the shapes {[list(shape) for shape in shapes]} by its batch_output"
            )
        flat = array.reshape(-1)
        ends = list(accumulate(counts))
        return [flat[end - count : end].reshape(shape) for end, count, shape in zip(ends, counts, shapes, strict=True)]


def _counts(shapes: Sequence[Shape]) -> list[int]:
    return [prod(shape) for shape in shapes]


def _item_shapes(shapes: Sequence[Shape]) -> Array:
    """The shape of each row of each request: a row's is that of its request, without the batch dimension."""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])])


_NUMBERS: dict[BatchInputKind, Numbers] = {
    BatchInputKind.BATCH_ELEMENT_COUNT: lambda shapes: np.array(_counts(shapes)),
    BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT: lambda shapes: np.cumsum(_counts(shapes)),
    BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: lambda shapes: np.cumsum([0, *_counts(shapes)]),
    # Only its shape matters; the elements are zeros.
    BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: lambda shapes: np.zeros(max(_counts(shapes))),
    BatchInputKind.BATCH_ITEM_SHAPE: _item_shapes,
    BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN: lambda shapes: _item_shapes(shapes).reshape(-1),
}
