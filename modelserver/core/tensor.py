"""A named, typed array, and the byte layout of BYTES tensors on the wire."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod
from typing import Any

import msgspec
import numpy as np

from modelserver.core import accelerator
from modelserver.core.datatype import Datatype
from modelserver.core.element_arrays import SLICE_ELEMENTS, empty_elements
from modelserver.core.long_work import Slices, finish
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


def is_long(tensors: Iterable[Tensor], *, as_text: bool) -> bool:
    """Whether it would hold the event loop for long to encode these; numbers are views where they are not text."""
    for tensor in tensors:
        if tensor.data.size > SLICE_ELEMENTS and (as_text or tensor.datatype.itemsize is None):
            return True
    return False


def placeholder(name: str, datatype: Datatype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape without memory of its own, for checks before the elements are read."""
    return Tensor(name, datatype, np.broadcast_to(np.zeros((), datatype.numpy), shape))


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
    return finish(bytes_element_slices(name, shape, raw))


def bytes_element_slices(name: str, shape: tuple[int, ...], raw: Buffer) -> Slices[np.ndarray[Any, Any]]:
    """As `decode_bytes_elements`, in slices of about a millisecond."""
    count = prod(shape)
    # Each element costs at least its length prefix: checked before a huge shape is allocated.
    if count * 4 > len(raw):
        raise InvalidArgumentError(
            f"input '{name}': expected {count} BYTES elements for shape {list(shape)}, but {len(raw)} bytes "
            f"can hold at most {len(raw) // 4}"
        )
    elements = empty_elements(count)
    split = accelerator.split_elements
    index = offset = 0
    while index < count:
        wanted = min(count - index, SLICE_ELEMENTS)
        found = None if split is None else split(raw, offset, wanted)
        if found is None:
            found = _split_elements(name, raw, offset, index, index + wanted, count)
        part, offset = found
        elements[index : index + len(part)] = part
        index += len(part)
        yield
    if offset != len(raw):
        raise InvalidArgumentError(
            f"input '{name}': {len(raw) - offset} unexpected bytes after the {count} BYTES elements "
            f"of shape {list(shape)}"
        )
    return elements.reshape(shape)


def _split_elements(
    name: str, raw: Buffer, offset: int, index: int, end_index: int, count: int
) -> tuple[list[bytes], int]:
    """The elements from `index` to `end_index` of `count`, the first of which is at `offset`, and where they end."""
    part: list[bytes] = []
    size = len(raw)
    for place in range(index, end_index):
        start = offset + 4
        if start > size:
            raise InvalidArgumentError(f"input '{name}': element {place} of {count} is missing from the BYTES data")
        (length,) = struct.unpack_from("<I", raw, offset)
        if start + length > size:
            raise InvalidArgumentError(
                f"input '{name}': element {place} claims {length} bytes, but only {size - start} are left"
            )
        offset = start + length
        part.append(bytes(raw[start:offset]))
    return part, offset


def encode_bytes_elements(elements: Iterable[Any]) -> bytes:
    """The wire form of BYTES elements; str elements are encoded as UTF-8."""
    return finish(encoding_slices(elements))


def encoding_slices(elements: Iterable[Any]) -> Slices[bytes]:
    """As `encode_bytes_elements`, in slices of about a millisecond."""
    parts: list[bytes] = []
    join = accelerator.join_elements
    for part in _element_lists(elements):
        joined = None if join is None else join(part)
        parts.append(_join_elements(part) if joined is None else joined)
        yield
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _element_lists(elements: Iterable[Any]) -> Iterator[list[Any]]:
    """The elements in lists of a slice each."""
    if isinstance(elements, np.ndarray):
        for start in range(0, len(elements), SLICE_ELEMENTS):
            yield elements[start : start + SLICE_ELEMENTS].tolist()
        return
    rest = iter(elements)
    while part := list(islice(rest, SLICE_ELEMENTS)):
        yield part


def _join_elements(elements: Iterable[Any]) -> bytes:
    parts = []
    for element in elements:
        raw = element if isinstance(element, bytes) else str(element).encode()
        parts.append(struct.pack("<I", len(raw)))
        parts.append(raw)
    return b"".join(parts)
