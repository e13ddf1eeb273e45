"""A named, typed array, and the byte layout of BYTES tensors on the wire."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod
from typing import Any, Final

import msgspec
import numpy as np

from modelserver.core import accelerator
from modelserver.core.datatype import Datatype
from modelserver.core.element_arrays import SLICE_ELEMENTS, empty_elements
from modelserver.core.large_buffers import joined
from modelserver.core.long_work import Slices, finish
from modelserver.errors import InvalidArgumentError

Buffer = bytes | bytearray | memoryview
# Tensors with more bytes are not copied in one turn of the event loop: their memory may be fresh, and then costs a
# millisecond.
MAX_BYTES_IN_TURN: Final = 1 << 20


class Tensor(msgspec.Struct, eq=False):
    """One input or output of a request.

    `data` has the tensor's shape and `datatype.numpy` as its dtype. It may be a read-only view of received bytes: copy
    it before writing. BYTES elements are `bytes` objects in an object array; BF16 elements are raw bit patterns in a
    uint16 array. Of a request to a model whose instances compute on one GPU it may be a `platform.cuda.DeviceArray`.
    """

    name: str
    datatype: Datatype
    data: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.data.shape
        return shape


def is_long(tensors: Iterable[Tensor], *, as_text: bool) -> bool:
    """Whether encoding these would block the event loop for long; numbers are views unless they become text."""
    for tensor in tensors:
        if tensor.datatype.itemsize is None:
            if num_bytes(tensor) > MAX_BYTES_IN_TURN:
                return True
        elif as_text and tensor.data.size > SLICE_ELEMENTS:
            return True
    return False


def num_bytes(tensor: Tensor) -> int:
    """About the bytes that a copy of the tensor has; at least MAX_BYTES_IN_TURN + 1 for very many BYTES elements."""
    data = tensor.data
    if tensor.datatype.itemsize is not None:
        return data.nbytes
    if data.size > SLICE_ELEMENTS:
        return MAX_BYTES_IN_TURN + data.size
    return sum([len(element) for element in data.reshape(-1).tolist() if isinstance(element, bytes | str)])


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
        return joined(list(_encoded_parts(tensor.data.ravel())))
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
        yield from _refusal_slices(name, shape, raw, count)
    elements = empty_elements(count)
    split = accelerator.split_elements
    index = offset = 0
    while index < count:
        wanted = min(count - index, SLICE_ELEMENTS)
        found = None if split is None else split(raw, offset, wanted)
        if found is None:
            found = _split_elements(name, shape, raw, offset, index, index + wanted, count)
        part, offset = found
        elements[index : index + len(part)] = part
        index += len(part)
        yield
    if offset != len(raw):
        if len(raw) - offset < 4:
            raise _prefix_error(name, len(raw) - offset)
        raise element_count_error(name, shape, count, count + 1)
    return elements.reshape(shape)


def element_count_error(name: str, shape: tuple[int, ...], count: int, found: int) -> InvalidArgumentError:
    """What is wrong with an input that has `found` BYTES elements, or more than `count`, where its shape says `count`.

    In Triton's words, which count one element too many at most.
    """
    whose = f"for inference input '{name}' for the model"
    if found < count:
        message = f"expected {count} string elements {whose}, got {found}"
    else:
        message = f"unexpected number of string elements {count + 1} {whose}, expecting {count}"
    return InvalidArgumentError(f"{message}: its shape is {list(shape)}")


def _prefix_error(name: str, num_bytes: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"incomplete string length indicator for inference input '{name}' for the model, expecting 4 bytes but only "
        f"{num_bytes} bytes available: every element has its length before it"
    )


def _refusal_slices(name: str, shape: tuple[int, ...], raw: Buffer, count: int) -> Slices[None]:
    """Counts the elements of a tensor that cannot have enough of them. Raises InvalidArgumentError."""
    index = offset = 0
    while offset < len(raw):
        end_index = index + SLICE_ELEMENTS
        while index < end_index and offset < len(raw):
            if offset + 4 > len(raw):
                raise _prefix_error(name, len(raw) - offset)
            offset += 4 + int(struct.unpack_from("<I", raw, offset)[0])
            index += 1
        yield
    raise element_count_error(name, shape, count, index)


def _split_elements(
    name: str, shape: tuple[int, ...], raw: Buffer, offset: int, index: int, end_index: int, count: int
) -> tuple[list[bytes], int]:
    """The elements from `index` to `end_index` of `count`, the first of which is at `offset`, and where they end."""
    part: list[bytes] = []
    size = len(raw)
    for place in range(index, end_index):
        start = offset + 4
        if offset == size:
            raise element_count_error(name, shape, count, place)
        if start > size:
            raise _prefix_error(name, size - offset)
        (length,) = struct.unpack_from("<I", raw, offset)
        if start + length > size:
            if place + 1 < count:
                raise element_count_error(name, shape, count, place + 1)
            raise InvalidArgumentError(
                f"incomplete string data for inference input '{name}', expecting string of length {length} but only "
                f"{size - start} bytes available: element {place} of {count}"
            )
        offset = start + length
        part.append(bytes(raw[start:offset]))
    return part, offset


def encode_bytes_elements(elements: Iterable[Any]) -> bytes:
    """The wire form of BYTES elements; str elements are encoded as UTF-8."""
    return b"".join(_encoded_parts(elements))


def _encoded_parts(elements: Iterable[Any]) -> Iterator[bytes]:
    """The wire form of BYTES elements in parts, each of which takes about a millisecond."""
    join = accelerator.join_elements
    for part in _element_lists(elements):
        encoded = None if join is None else join(part)
        yield _join_elements(part) if encoded is None else encoded


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
