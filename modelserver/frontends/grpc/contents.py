"""Tensors from the typed `contents` of a request: one repeated field per family of datatypes.

Long contents are cut into short ones, which are equivalent when read in sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from modelserver.core import accelerator
from modelserver.core.datatype import Datatype
from modelserver.core.element_arrays import empty_array
from modelserver.core.long_work import Slices
from modelserver.core.tensor import Tensor, element_count_error
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.grpc.envelope import MalformedError, read_field, varint
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
# Triton's words for the elements of a field.
_TYPES_OF_FIELDS = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}
# 8- and 16-bit integers travel in 32 bits and may be out of range there.
_NARROW: dict[Datatype, np.dtype[Any]] = {
    Datatype.INT8: np.dtype(np.int32),
    Datatype.INT16: np.dtype(np.int32),
    Datatype.UINT8: np.dtype(np.uint32),
    Datatype.UINT16: np.dtype(np.uint32),
}
# Bytes that are parsed at a time: some 2 ms at worst.
_PIECE_BYTES = 64 * 1024
# Tags of packed numbers with the layout of memory, and of those that are varints.
_PACKED_FIXED: dict[int, np.dtype[Any]] = {0x32: np.dtype("<f4"), 0x3A: np.dtype("<f8")}
_PACKED_VARINTS = frozenset((0x0A, 0x12, 0x1A, 0x22, 0x2A))


def tensor_from_contents(
    name: str, datatype: Datatype, shape: tuple[int, ...], contents: pb.InferTensorContents
) -> Tensor:
    """The tensor whose elements are in `contents`; `shape` has been checked.

    Raises InvalidArgumentError for the wrong field, too few or many elements, or one out of range.
    """
    data = _elements(name, datatype, contents)
    if len(data) != prod(shape):
        raise _count_error(name, datatype, shape, len(data))
    return Tensor(name, datatype, data.reshape(shape))


def tensor_slices(name: str, datatype: Datatype, shape: tuple[int, ...], views: Sequence[memoryview]) -> Slices[Tensor]:
    """As `tensor_from_contents`, in slices; the contents are all of `views`, which are serialized, as if joined."""
    _field_of(name, datatype)
    expected = prod(shape)
    is_fillable = expected <= sum(map(len, views))  # every element takes a byte: no huge shape is allocated
    data = empty_array(expected if is_fillable else 0, datatype.numpy)
    done = 0
    yield
    for view in views:
        for tag, piece in _pieces(view):
            dtype = _PACKED_FIXED.get(tag)
            if dtype == datatype.numpy and len(piece) % datatype.numpy.itemsize == 0:
                part = np.frombuffer(piece, dtype)
            else:
                whole = bytes(piece) if tag == 0 else b"%b%b%b" % (varint(tag), varint(len(piece)), bytes(piece))
                part = _elements(name, datatype, _parsed(whole), done)
            if done + len(part) > expected:
                raise _count_error(name, datatype, shape, None)
            if is_fillable:
                data[done : done + len(part)] = part
            done += len(part)
            yield
    if done != expected:
        raise _count_error(name, datatype, shape, done)
    return Tensor(name, datatype, data.reshape(shape))


def _pieces(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Several whole fields, with tag 0; or a part of the packed numbers of one field, with its tag."""
    at = 0
    while at < len(view):
        end = _pass_fields(view, at, at + _PIECE_BYTES)
        tag, body, behind = read_field(view, at)
        is_packed = tag in _PACKED_VARINTS or tag in _PACKED_FIXED
        if end - at <= 2 * _PIECE_BYTES or not is_packed:
            yield 0, view[at:end]
            at = end
            continue
        while body < behind:
            stop = min(body + _PIECE_BYTES, behind)
            if tag in _PACKED_VARINTS:
                # A varint ends with a byte below 128, and has 10 at most.
                last = min(stop + 10, behind)
                while stop < last and view[stop - 1] >= 0x80:
                    stop += 1
            yield tag, view[body:stop]
            body = stop
        at = behind


def _pass_fields(view: memoryview, at: int, until: int) -> int:
    """The end of the first field from `at` on that ends at or after `until`, or else of the last field."""
    if accelerator.pass_fields is not None:
        end = accelerator.pass_fields(view, at, until)
    else:
        try:
            while at < min(until, len(view)):
                _, _, at = read_field(view, at)
        except IndexError:
            raise MalformedError from None
        end = at if at <= len(view) else None
    if end is None:
        raise MalformedError
    return end


def _parsed(serialized: bytes) -> pb.InferTensorContents:
    try:
        return pb.InferTensorContents.FromString(serialized)
    except DecodeError:
        raise MalformedError from None


def _field_of(name: str, datatype: Datatype) -> str:
    field = _FIELDS.get(datatype)
    if field is None:
        raise InvalidArgumentError(
            f"input '{name}': {datatype.value} has no field in contents; send it in raw_input_contents"
        )
    return field


def _elements(name: str, datatype: Datatype, contents: pb.InferTensorContents, start: int = 0) -> np.ndarray[Any, Any]:
    """The elements of some contents, the first of which is element `start` of the tensor."""
    field = _field_of(name, datatype)
    given = [descriptor.name for descriptor, _ in contents.ListFields()]
    if given and given != [field]:
        raise InvalidArgumentError(
            f"unexpected explicit tensor data for input tensor '{name}' for the model of type "
            f"'{_TYPES_OF_FIELDS[given[0]]}', expected datatype '{datatype.value}': it belongs in {field}, got "
            f"{' and '.join(given)}"
        )
    elements = getattr(contents, field)
    if datatype is Datatype.BYTES:
        data = np.empty(len(elements), dtype=object)
        data[:] = elements[:]
        return data
    wide = np.fromiter(elements, _NARROW.get(datatype, datatype.numpy), len(elements))
    return _narrowed(name, datatype, wide, start) if datatype in _NARROW else wide


def _count_error(name: str, datatype: Datatype, shape: tuple[int, ...], got: int | None) -> InvalidArgumentError:
    """In Triton's words, which count elements of BYTES, and bytes of other datatypes."""
    count = prod(shape)
    detail = f"expected {count} elements in {_FIELDS[datatype]} for shape {list(shape)}"
    if datatype.itemsize is None:
        error = element_count_error(name, shape, count, count + 1 if got is None else got)
        return InvalidArgumentError(f"{error.message}; {detail}")
    num_bytes = "more" if got is None else got * datatype.itemsize
    return InvalidArgumentError(
        f"input byte size mismatch for input '{name}' for the model. Expected {count * datatype.itemsize}, got "
        f"{num_bytes}: {detail}"
    )


def _narrowed(name: str, datatype: Datatype, wide: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
    limits = np.iinfo(datatype.numpy)
    outside = np.flatnonzero((wide < limits.min) | (wide > limits.max))
    if outside.size:
        index = int(outside[0])
        raise InvalidArgumentError(
            f"input '{name}': element {start + index} is {wide[index]}, "
            f"outside the range of {datatype.value} ({limits.min} to {limits.max})"
        )
    return wide.astype(datatype.numpy)
