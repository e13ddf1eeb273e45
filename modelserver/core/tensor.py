"""A named, typed array, and the byte layout of BYTES tensors on the wire."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import prod
from typing import Any

import msgspec
import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError

Buffer = bytes | bytearray | memoryview


class Tensor(msgspec.Struct, eq=False):
    """One input or output of a request.

    `data` has the tensor's shape and `datatype.numpy` as its dtype. It may be a read-only view of
    received bytes: whoever wants to write copies first. BYTES elements are `bytes` objects in an
    object array; BF16 elements are raw bit patterns in a uint16 array.
    """

    name: str
    datatype: Datatype
    data: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.data.shape
        return shape


def tensor_from_bytes(name: str, datatype: Datatype, shape: tuple[int, ...], raw: Buffer) -> Tensor:
    """A tensor over little-endian row-major bytes; a view of `raw` except for BYTES.

    Raises InvalidArgumentError when the byte count does not fit the shape.
    """
    if datatype.itemsize is None:
        return Tensor(name, datatype, decode_bytes_elements(name, shape, raw))
    expected = prod(shape) * datatype.itemsize
    if len(raw) != expected:
        raise InvalidArgumentError(
            f"input byte size mismatch for input '{name}' for the model. Expected {expected}, got {len(raw)}: its "
            f"shape is {list(shape)} of {datatype.value}"
        )
    return Tensor(name, datatype, np.frombuffer(raw, datatype.numpy).reshape(shape))


def tensor_to_bytes(tensor: Tensor) -> Buffer:
    """The tensor's wire bytes; a view of its memory where the layout allows it."""
    if tensor.datatype is Datatype.BYTES:
        return encode_bytes_elements(tensor.data.ravel())
    data = tensor.data
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    return data.reshape(-1).view(np.uint8).data


def decode_bytes_elements(name: str, shape: tuple[int, ...], raw: Buffer) -> np.ndarray[Any, Any]:
    """Split a BYTES tensor (4-byte little-endian length before each element) into an object array."""
    count = prod(shape)
    # Each element costs at least its length prefix: checked before a huge shape is allocated.
    if count * 4 > len(raw):
        raise InvalidArgumentError(
            f"input '{name}': expected {count} BYTES elements for shape {list(shape)}, but {len(raw)} bytes "
            f"can hold at most {len(raw) // 4}"
        )
    elements = np.empty(count, dtype=object)
    view = bytes(raw)
    offset = 0
    for index in range(count):
        end = offset + 4
        if end > len(view):
            raise InvalidArgumentError(f"input '{name}': element {index} of {count} is missing from the BYTES data")
        (length,) = struct.unpack_from("<I", view, offset)
        if end + length > len(view):
            raise InvalidArgumentError(
                f"input '{name}': element {index} claims {length} bytes, but only {len(view) - end} are left"
            )
        elements[index] = view[end : end + length]
        offset = end + length
    if offset != len(view):
        raise InvalidArgumentError(
            f"input '{name}': {len(view) - offset} unexpected bytes after the {count} BYTES elements "
            f"of shape {list(shape)}"
        )
    return elements.reshape(shape)


def encode_bytes_elements(elements: Iterable[Any]) -> bytes:
    """The wire form of BYTES elements; str elements are encoded as UTF-8."""
    parts = []
    for element in elements:
        raw = element if isinstance(element, bytes) else str(element).encode()
        parts.append(struct.pack("<I", len(raw)))
        parts.append(raw)
    return b"".join(parts)
