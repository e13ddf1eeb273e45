"""One GGUF file: its metadata, and where its tensors lie. Nothing in it is trusted."""

from __future__ import annotations

import enum
import itertools
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .checkpoint import file_stamp
from .gguf_types import REMOVED_TYPES, TENSOR_TYPES, TensorType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_USUAL_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 24
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 4  # of arrays in arrays
# Metadata are mostly the vocabulary: those of 256,000 tokens take some 20 MB.
_MAX_HEADER_BYTES = 1 << 29
_FIRST_READ = 1 << 20
# The fewest bytes that an entry of metadata or of the list of tensors can have.
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


class ValueType(enum.IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALARS = {
    ValueType.UINT8: "u1",
    ValueType.INT8: "i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.BOOL: "u1",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a value lies in the header. `count` is None of a scalar; `kind` is that of an array's elements."""

    kind: ValueType
    start: int
    count: int | None = None


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`shape` as torch has it, the last dimension contiguous. `start`: the first of its bytes in the file."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.block_len * self.kind.block_bytes

    @property
    def num_rows(self) -> int:
        rows = 1
        for length in self.shape[:-1]:
            rows *= length
        return rows

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class GgufFile:
    """Read whole and checked when it is made, but for the tensors, which are read one by one.

    InvalidArgumentError names the file, the tensor or the key of metadata, and the offset of what is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: int | None = None
        self._texts: dict[str, list[str]] = {}
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self._state = _state_of(descriptor)
                self._stamp = file_stamp(os.fstat(descriptor))
                header = _Header(path, descriptor, self._state[0])
                header.read()
            finally:
                os.close(descriptor)
        except OSError as error:
            raise InvalidArgumentError(f"{path} cannot be read: {error}") from None
        self.version = header.version
        self.tensors: Mapping[str, TensorPlace] = header.tensors
        self._values = header.values
        self._data = memoryview(bytes(header.data[: header.at]))

    @property
    def header(self) -> memoryview:
        """All bytes before the data of tensors."""
        return self._data

    @property
    def stamp(self) -> str:
        """Changes with the file."""
        return f"{self.path.name} {self._stamp}"

    # Metadata. InvalidArgumentError for a value of another type than the caller expects.

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def integer(self, key: str) -> int | None:
        value = self._scalar(key, "an integer", "iu")
        return None if value is None else int(value)

    def number(self, key: str) -> float | None:
        value = self._scalar(key, "a number", "iuf")
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is None:
            return None
        if value.kind is not ValueType.BOOL or value.count is not None:
            raise self._wrong(key, "true or false")
        return bool(self._data[value.start])

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is None:
            return None
        if value.kind is not ValueType.STRING or value.count is not None:
            raise self._wrong(key, "a string")
        begin = value.start + 8
        end = begin + _LENGTH.unpack_from(self._data, value.start)[0]
        try:
            return str(self._data[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise self._not_unicode(key, begin, error) from None

    def texts(self, key: str) -> list[str] | None:
        """Not to be changed: the vocabulary is asked for several times."""
        value = self._values.get(key)
        if value is None:
            return None
        if value.kind is not ValueType.STRING or value.count is None:
            raise self._wrong(key, "an array of strings")
        if key in self._texts:
            return self._texts[key]
        found, at, data = [], value.start, bytes(self._data)
        try:
            for _ in range(value.count):
                begin = at + 8
                at = begin + _LENGTH.unpack_from(data, at)[0]
                found.append(data[begin:at].decode())
        except UnicodeDecodeError as error:
            raise self._not_unicode(key, begin, error) from None
        self._texts[key] = found
        return found

    def numbers(self, key: str) -> NDArray[Any] | None:
        """Of an array of numbers or flags."""
        value = self._values.get(key)
        if value is None:
            return None
        if value.kind not in _SCALARS or value.count is None:
            raise self._wrong(key, "an array of numbers")
        return np.frombuffer(self._data, _SCALARS[value.kind], value.count, value.start)

    def is_array(self, key: str) -> bool:
        value = self._values.get(key)
        return value is not None and value.count is not None

    def _scalar(self, key: str, expected: str, kinds: str) -> Any:
        value = self._values.get(key)
        if value is None:
            return None
        code = _SCALARS.get(value.kind)
        if value.count is not None or code is None or value.kind is ValueType.BOOL or np.dtype(code).kind not in kinds:
            raise self._wrong(key, expected)
        return np.frombuffer(self._data, code, 1, value.start)[0]

    def _not_unicode(self, key: str, at: int, error: UnicodeDecodeError) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.path}: the metadata {key!r} at byte {at} are not UTF-8: {error.reason}")

    def _wrong(self, key: str, expected: str) -> InvalidArgumentError:
        value = self._values[key]
        found = value.kind.name.lower()
        found = f"{value.count} of {found}" if value.count is not None else found
        return InvalidArgumentError(f"{self.path}: the metadata {key!r} are {found}: expected {expected}")

    # Tensors.

    def place(self, name: str) -> TensorPlace:
        try:
            return self.tensors[name]
        except KeyError:
            raise InvalidArgumentError(f"{self.path} has no tensor {name}") from None

    def rows(self, name: str, first: int = 0, count: int | None = None) -> NDArray[np.uint8]:
        """The bytes of rows, [count, bytes of a row], in memory of their own."""
        place = self.place(name)
        count = place.num_rows - first if count is None else count
        assert 0 <= first <= first + count <= place.num_rows, "rows are the tensor's own"
        rows = np.empty((count, place.row_bytes), np.uint8)
        view, at = rows.reshape(-1).data, place.start + first * place.row_bytes
        while view:
            try:
                num_read = os.preadv(self._descriptor(), [view[: 1 << 30]], at)
            except OSError as error:
                raise InvalidArgumentError(f"{self.path}: tensor {name} cannot be read at byte {at}: {error}") from None
            if not num_read:
                raise InvalidArgumentError(f"{self.path} ends at byte {at}, within the tensor {name}")
            view, at = view[num_read:], at + num_read
        return rows

    def close(self) -> None:
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def _descriptor(self) -> int:
        if self._opened is None:
            descriptor = os.open(self.path, os.O_RDONLY)
            if _state_of(descriptor) != self._state:
                os.close(descriptor)
                raise InvalidArgumentError(f"{self.path} has changed since its header was read")
            self._opened = descriptor
        return self._opened


def _state_of(descriptor: int) -> tuple[int, int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns, found.st_ino


class _Header:
    """Reads a file from its beginning, no further than it must."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.version = 0
        self.data = bytearray()
        self.at = 0
        self.values: dict[str, _Value] = {}
        self.tensors: dict[str, TensorPlace] = {}
        self._descriptor = descriptor
        self._size = size

    def read(self) -> None:
        self._need(4, "its first four bytes")
        if self.data[:4] != _MAGIC:
            raise InvalidArgumentError(f"{self.path} is not a GGUF file: it begins with {bytes(self.data[:4])!r}")
        self.at = 4
        self.version = self._number("<I", "its version")
        if self.version not in _VERSIONS:
            if int.from_bytes(self.version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise UnsupportedError(f"{self.path} is a GGUF file for big-endian machines, which is not supported")
            raise UnsupportedError(f"{self.path} is a GGUF file of version {self.version}: expected 2 or 3")
        num_tensors = self._count("the number of tensors", _LEAST_TENSOR)
        num_values = self._count("the number of metadata", _LEAST_ENTRY)
        for index in range(num_values):
            self._read_value(index)
        described = [self._read_tensor(index) for index in range(num_tensors)]
        self._place(described)

    def _read_value(self, index: int) -> None:
        at = self.at
        key = self._string(f"the name of metadata {index}")
        if key in self.values:
            raise InvalidArgumentError(f"{self.path}: the metadata {key!r} occur twice, again at byte {at}")
        what = f"the metadata {key!r}"
        self.values[key] = self._value(self._type(what), what, depth=0)

    def _value(self, kind: ValueType, what: str, *, depth: int) -> _Value:
        start = self.at
        if kind is ValueType.STRING:
            self._skip_strings(1, what)
            return _Value(kind, start)
        if kind is not ValueType.ARRAY:
            self._skip(np.dtype(_SCALARS[kind]).itemsize, what)
            return _Value(kind, start)
        if depth == _MAX_DEPTH:
            raise InvalidArgumentError(f"{self.path}: {what} are arrays in arrays beyond byte {start}: too deep")
        element = self._type(what)
        size = 8 if element is ValueType.STRING else 12
        if element in _SCALARS:
            size = np.dtype(_SCALARS[element]).itemsize
        count = self._count(f"the length of {what}", size)
        start = self.at
        if element is ValueType.STRING:
            self._skip_strings(count, what)
        elif element is ValueType.ARRAY:
            for _ in range(count):
                self._value(element, what, depth=depth + 1)
        else:
            self._skip(count * size, what)
        return _Value(element, start, count)

    def _read_tensor(self, index: int) -> tuple[str, TensorType, tuple[int, ...], int, int]:
        """Name, type, shape, offset in the data, and where that is written."""
        at = self.at
        name = self._string(f"the name of tensor {index}")
        if not name:
            raise InvalidArgumentError(f"{self.path}: tensor {index}, at byte {at}, has no name")
        what = f"tensor {name!r}"
        num_dimensions = self._number("<I", f"the dimensions of {what}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise InvalidArgumentError(
                f"{self.path}: {what}, at byte {at}, has {num_dimensions} dimensions: expected 1 to {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._number("<Q", f"the shape of {what}") for _ in range(num_dimensions))[::-1]
        number = self._number("<I", f"the type of {what}")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = f" ({REMOVED_TYPES[number]}, which files no longer have)" if number in REMOVED_TYPES else ""
            raise InvalidArgumentError(f"{self.path}: {what}, at byte {at}, is of the unknown type {number}{known}")
        num_values = 1
        for length in shape:
            num_values *= length
        # The data lie in the file, so that no tensor has more values than the file has bits.
        if not 1 <= num_values <= 8 * self._size or shape[-1] % kind.block_len:
            multiple = f" of rows that are multiples of {kind.block_len}" if kind.is_quantized else ""
            raise InvalidArgumentError(
                f"{self.path}: {what}, at byte {at}, has the shape {list(shape)}: not one{multiple} that a "
                f"{kind.name} of this file can have"
            )
        return name, kind, shape, self._number("<Q", f"the offset of {what}"), at

    def _place(self, described: list[tuple[str, TensorType, tuple[int, ...], int, int]]) -> None:
        alignment = self._alignment()
        start = -(-self.at // alignment) * alignment
        for name, kind, shape, offset, at in described:
            if name in self.tensors:
                raise InvalidArgumentError(f"{self.path}: tensor {name!r} occurs twice, again at byte {at}")
            place = TensorPlace(name, kind, shape, start + offset)
            if offset % alignment:
                raise InvalidArgumentError(
                    f"{self.path}: tensor {name!r} has the offset {offset}, not a multiple of {alignment}"
                )
            if place.start + place.num_bytes > self._size:
                raise InvalidArgumentError(
                    f"{self.path}: tensor {name!r} ends at byte {place.start + place.num_bytes} of a file of "
                    f"{self._size}: the file is truncated, or its header is wrong"
                )
            self.tensors[name] = place
        places = sorted(self.tensors.values(), key=lambda place: place.start)
        for before, after in itertools.pairwise(places):
            if before.start + before.num_bytes > after.start:
                raise InvalidArgumentError(
                    f"{self.path}: tensor {after.name!r} begins at byte {after.start}, within {before.name!r}"
                )

    def _alignment(self) -> int:
        value = self.values.get(_ALIGNMENT_KEY)
        if value is None:
            return _USUAL_ALIGNMENT
        alignment = 0
        if value.kind is ValueType.UINT32 and value.count is None:
            alignment = struct.unpack_from("<I", self.data, value.start)[0]
        if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise InvalidArgumentError(
                f"{self.path}: the metadata {_ALIGNMENT_KEY!r} at byte {value.start}: expected a power of two"
            )
        return alignment

    def _type(self, what: str) -> ValueType:
        at = self.at
        number = self._number("<I", what)
        try:
            return ValueType(number)
        except ValueError:
            raise InvalidArgumentError(f"{self.path}: {what} are of the unknown type {number}, at byte {at}") from None

    def _count(self, what: str, least_bytes: int) -> int:
        """Read a count of items that take at least this many bytes each."""
        at = self.at
        count = self._number("<Q", what)
        if count * least_bytes > self._size - self.at:
            raise InvalidArgumentError(
                f"{self.path}: {what}, at byte {at}, is {count}, more than a file of {self._size} bytes can hold"
            )
        return count

    def _string(self, what: str) -> str:
        start = self.at
        self._skip_strings(1, what)
        try:
            return self.data[start + 8 : self.at].decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"{self.path}: {what}, at byte {start}, is not UTF-8") from None

    def _skip_strings(self, count: int, what: str) -> None:
        at, data, end = self.at, self.data, len(self.data)
        for _ in range(count):
            if at + 8 > end:
                self.at = at
                end = self._need(8, what)
            length = _LENGTH.unpack_from(data, at)[0]
            at += 8
            if at + length > end:
                self.at = at
                end = self._need(length, what)
            at += length
        self.at = at

    def _skip(self, num_bytes: int, what: str) -> None:
        self._need(num_bytes, what)
        self.at += num_bytes

    def _number(self, form: str, what: str) -> int:
        size = struct.calcsize(form)
        self._need(size, what)
        value: int = struct.unpack_from(form, self.data, self.at)[0]
        self.at += size
        return value

    def _need(self, num_bytes: int, what: str) -> int:
        """Have that many bytes from `at` on in memory; returns how many there are from the file's beginning."""
        end = self.at + num_bytes
        if end > self._size:
            raise InvalidArgumentError(
                f"{self.path}: {what}, at byte {self.at}, would end at byte {end} of a file of {self._size}"
            )
        if end > _MAX_HEADER_BYTES:
            raise InvalidArgumentError(f"{self.path}: {what}, at byte {self.at}, lies beyond {_MAX_HEADER_BYTES} bytes")
        while len(self.data) < end:
            wanted = min(self._size, max(end, 2 * len(self.data), _FIRST_READ)) - len(self.data)
            read = os.pread(self._descriptor, wanted, len(self.data))
            if not read:
                raise InvalidArgumentError(f"{self.path} ends at byte {len(self.data)}, within {what}")
            self.data += read
        return len(self.data)
