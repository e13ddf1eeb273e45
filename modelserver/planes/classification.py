"""The classification extension: an output's highest elements as `value:index` or `value:index:label`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError

# Of one row: more would block the event loop.
_MAX_ELEMENTS = 1_000_000
_UNORDERED = (Datatype.BOOL, Datatype.BYTES)


def classify(tensor: Tensor, count: int, labels: Sequence[str], *, is_batched: bool) -> Tensor:
    """The `count` highest elements of each row (of all, without batching), the highest first.

    Of equal elements the lower index comes first; NaN ranks lowest. `labels` are by index, and may be fewer than the
    elements. Raises InvalidArgumentError for a datatype without an order, or too many elements.
    """
    if tensor.datatype in _UNORDERED:
        raise InvalidArgumentError(
            f"class result not available for output due to unsupported type '{tensor.datatype.value}', which output "
            f"'{tensor.name}' has"
        )
    data = _as_numbers(tensor)
    rows = data.reshape(data.shape[0], -1) if is_batched and data.shape[0] else data.reshape(1, -1)
    num_elements = rows.shape[1]
    if num_elements > _MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"classification output tensor too large: output '{tensor.name}' has {num_elements} elements, at most "
            f"{_MAX_ELEMENTS} are possible"
        )
    count = min(count, num_elements)
    is_float = data.dtype.kind == "f"
    texts = np.empty((rows.shape[0], count), dtype=object)
    for row, values in enumerate(rows):
        for place, index in enumerate(_highest(values, count)):
            texts[row, place] = _text(values[index], index, labels, is_float=is_float)
    return Tensor(tensor.name, Datatype.BYTES, texts if is_batched else texts.reshape(count))


def _as_numbers(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.datatype is Datatype.BF16:
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    return tensor.data


def _highest(values: np.ndarray[Any, Any], count: int) -> list[int]:
    """Indices of the highest values, in order."""
    if count == 0:
        return []
    ordered = np.where(np.isnan(values), -np.inf, values) if values.dtype.kind == "f" else values
    if count < len(ordered):
        # Sorting all of a large output to find a few would take many times longer.
        limit = np.partition(ordered, len(ordered) - count)[len(ordered) - count]
        candidates = np.flatnonzero(ordered >= limit)
    else:
        candidates = np.arange(len(ordered))
    # A stable sort of the reversed candidates, read backwards, leaves equal ones in their order.
    backwards = candidates[::-1]
    best = backwards[np.argsort(ordered[backwards], kind="stable")][::-1]
    return best[:count].tolist()  # type: ignore[no-any-return]


def _text(value: Any, index: int, labels: Sequence[str], *, is_float: bool) -> bytes:
    number = f"{value:f}" if is_float else str(value)
    label = labels[index] if index < len(labels) else ""
    return (f"{number}:{index}:{label}" if label else f"{number}:{index}").encode()
