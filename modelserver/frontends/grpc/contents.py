"""Tensors from the typed `contents` of a request: one repeated field per family of datatypes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.pb import grpc_service_pb2 as pb

# FP16 and BF16 are absent: they have no field and travel as raw contents only.
_FIELDS: dict[Datatype, str] = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
# 8- and 16-bit integers travel in 32 bits and may be out of range there.
_NARROW: dict[Datatype, np.dtype[Any]] = {
    Datatype.INT8: np.dtype(np.int32),
    Datatype.INT16: np.dtype(np.int32),
    Datatype.UINT8: np.dtype(np.uint32),
    Datatype.UINT16: np.dtype(np.uint32),
}


def tensor_from_contents(
    name: str, datatype: Datatype, shape: tuple[int, ...], contents: pb.InferTensorContents
) -> Tensor:
    """The tensor whose elements are in `contents`; `shape` has been checked.

    Raises InvalidArgumentError for the wrong field, too few or many elements, or one out of range.
    """
    field = _FIELDS.get(datatype)
    if field is None:
        raise InvalidArgumentError(
            f"input '{name}': {datatype.value} has no field in contents; send it in raw_input_contents"
        )
    given = [descriptor.name for descriptor, _ in contents.ListFields()]
    if given and given != [field]:
        raise InvalidArgumentError(f"input '{name}': {datatype.value} belongs in {field}, got {' and '.join(given)}")
    elements = getattr(contents, field)
    expected = prod(shape)
    if len(elements) != expected:
        raise InvalidArgumentError(
            f"input '{name}': expected {expected} elements in {field} for shape {list(shape)}, got {len(elements)}"
        )
    data: np.ndarray[Any, Any]
    if datatype is Datatype.BYTES:
        data = np.empty(expected, dtype=object)
        data[:] = elements[:]
    else:
        data = np.fromiter(elements, _NARROW.get(datatype, datatype.numpy), expected)
        if datatype in _NARROW:
            data = _narrowed(name, datatype, data)
    return Tensor(name, datatype, data.reshape(shape))


def _narrowed(name: str, datatype: Datatype, wide: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    limits = np.iinfo(datatype.numpy)
    outside = np.flatnonzero((wide < limits.min) | (wide > limits.max))
    if outside.size:
        index = int(outside[0])
        raise InvalidArgumentError(
            f"input '{name}': element {index} is {wide[index]}, "
            f"outside the range of {datatype.value} ({limits.min} to {limits.max})"
        )
    return wide.astype(datatype.numpy)
