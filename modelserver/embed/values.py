"""Values of a Python program as tensors of a request, and tensors of a response as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from modelserver.backend import Array, Datatype, InvalidArgumentError, ModelConfig, Tensor


def tensors_of(config: ModelConfig, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arrays of the model's datatypes. Raises InvalidArgumentError for values that have none."""
    known = {spec.name: spec for spec in config.input}
    tensors = {}
    for name, value in inputs.items():
        spec = known.get(name)
        datatype = spec.data_type if spec is not None and spec.data_type is not None else None
        if datatype is None and np.asarray(value).dtype.kind in "SU":
            datatype = Datatype.BYTES
        data = _array(name, value, datatype)
        if data.ndim == 0 and spec is not None:
            data = data.reshape((1,) * (len(spec.dims) + bool(config.max_batch_size)))
        tensors[name] = Tensor(name, datatype or _datatype(name, data), data)
    return tensors


def _array(name: str, value: Any, datatype: Datatype | None) -> Array:
    is_text = isinstance(value, str | bytes | dict)
    array = np.asarray(value, object) if is_text or datatype is Datatype.BYTES else np.asarray(value)
    if datatype is None or (array.dtype == datatype.numpy and datatype is not Datatype.BYTES):
        return array
    try:
        if datatype is not Datatype.BYTES:
            return array.astype(datatype.numpy, casting="same_kind" if isinstance(value, np.ndarray) else "unsafe")
        return texts(array)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"input '{name}': no {datatype.value} can be made of it: {error}") from None


def texts(array: Array) -> Array:
    """Elements of BYTES: texts as UTF-8, and other values as JSON."""
    flat = [
        one.encode() if isinstance(one, str) else one if isinstance(one, bytes) else orjson.dumps(one)
        for one in array.ravel().tolist()
    ]
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(array.shape)


def _datatype(name: str, data: Array) -> Datatype:
    try:
        return Datatype.from_numpy(data.dtype)
    except KeyError:
        raise InvalidArgumentError(f"input '{name}': no datatype carries arrays of {data.dtype}") from None


def values_of(outputs: Sequence[Tensor], readers: Mapping[str, Callable[[Array], Any]]) -> dict[str, Any]:
    """Outputs by name: what their reader makes of them, or arrays."""
    return {
        tensor.name: readers[tensor.name](tensor.data) if tensor.name in readers else tensor.data for tensor in outputs
    }
