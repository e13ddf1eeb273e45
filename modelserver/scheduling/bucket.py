"""Which requests may share a batch: those with the same bucket key."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from modelserver.config.schema import ModelConfig
from modelserver.core.request import InFlightRequest

BucketKey = Callable[[InFlightRequest], Hashable]


def bucket_key(config: ModelConfig) -> BucketKey | None:
    """How to tell which of the model's requests fit together; None when all of them do.

    The key holds what may differ between two valid requests and must not within a batch: which optional
    inputs are present, the sizes of variable dimensions without the batch dimension, and the contents of
    shape tensors. Ragged inputs may differ.
    """
    optional = tuple(spec.name for spec in config.input if spec.optional)
    variable = tuple(spec.name for spec in config.input if -1 in spec.dims and not spec.allow_ragged_batch)
    by_content = tuple(spec.name for spec in config.input if spec.is_shape_tensor)
    if not optional and not variable and not by_content:
        return None

    if len(variable) == 1 and not optional and not by_content:
        # The usual model that needs a key at all.
        [only] = variable
        return lambda request: request.inputs[only].data.shape[1:]

    def key(request: InFlightRequest) -> Hashable:
        inputs = request.inputs
        parts: list[Hashable] = [name in inputs for name in optional]
        parts += [inputs[name].data.shape[1:] for name in variable if name in inputs]
        parts += [inputs[name].data.tobytes() for name in by_content if name in inputs]
        return tuple(parts)

    return key
