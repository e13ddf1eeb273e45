"""The header of a safetensors file, and the index of several files. Nothing in them is trusted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeGuard

from modelserver.backend import InvalidArgumentError, parse_json

INDEX = "model.safetensors.index.json"
# As the library `safetensors` has it.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 64
# The largest number of values that torch can count.
_MAX_VALUES = (1 << 63) - 1
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """`dtype` as the file calls it. `start`: the first of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Each tensor of a file by its name. No tensor is read.

    InvalidArgumentError names the file, the tensor and the offset of what is broken: tensors lie within the file, one
    behind the other, without gaps.
    """
    try:
        if not path.is_file():
            raise InvalidArgumentError(f"there is no file {path}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = _header_bytes(path, file, size)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None
    try:
        header = parse_json(data.decode(), str(path)) if data[:1] == b"{" else None
    except ValueError as error:
        raise InvalidArgumentError(f"{path}: its header of {len(data)} bytes is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise InvalidArgumentError(f"{path}: its header of {len(data)} bytes is not a JSON object")
    metadata = header.pop("__metadata__", None)
    texts = metadata.values() if isinstance(metadata, dict) else [metadata]
    if metadata is not None and not all(isinstance(text, str) for text in texts):
        raise InvalidArgumentError(f"{path}: its __metadata__ must be an object of texts")
    start = _LENGTH_BYTES + len(data)
    tensors = {name: _tensor(path, name, described, start, size) for name, described in header.items()}
    _check_places(path, tensors, start, size)
    return tensors


def read_index(directory: Path) -> dict[Path, list[str]] | None:
    """Each file of a directory's index with the names to take from it; None without an index.

    InvalidArgumentError if it is broken, or names a file outside of the directory.
    """
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        document = parse_json(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} is not a safetensors index: {error}") from None
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict):
        raise InvalidArgumentError(f"{path} is not a safetensors index: it has no object 'weight_map'")
    files: dict[Path, list[str]] = {}
    for tensor, name in places.items():
        if not _is_inside(name):
            raise InvalidArgumentError(
                f"{path} places {tensor!r:.200} in {name!r:.200}: expected the name of a file in {directory}"
            )
        files.setdefault(directory / name, []).append(tensor)
    return files


def read_headers(directory: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """Where each tensor of a directory lies: in the files that its index names, else in all that are there.

    InvalidArgumentError as above, and for a directory without any file of tensors.
    """
    files: Mapping[Path, list[str] | None] | None = read_index(directory)
    if files is None:
        files = dict.fromkeys(sorted(directory.glob("*.safetensors")))
        if not files:
            raise InvalidArgumentError(
                f"no safetensors in {directory}: convert its weights (save_pretrained(..., safe_serialization=True))"
            )
    found = {}
    for path, names in files.items():
        header = read_header(path)
        for name in header if names is None else names:
            if name not in header:
                raise InvalidArgumentError(f"{directory / INDEX} places {name} in {path.name}, which lacks it")
            found[name] = path, header[name]
    return found


def _is_inside(name: Any) -> bool:
    if not isinstance(name, str) or "\0" in name:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and _is_unicode(name)


def _is_unicode(text: str) -> bool:
    """JSON may have halves of surrogate pairs, which no log takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _header_bytes(path: Path, file: BinaryIO, size: int) -> bytes:
    if size < _LENGTH_BYTES:
        raise InvalidArgumentError(f"{path} cannot be read as safetensors: it has {size} bytes")
    count = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if count > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise InvalidArgumentError(
            f"{path}: its first {_LENGTH_BYTES} bytes announce a header of {count} bytes, in a file of {size} bytes; "
            f"{_MAX_HEADER_BYTES} are supported"
        )
    data = file.read(count)
    if len(data) != count:
        raise InvalidArgumentError(f"{path} ends at byte {_LENGTH_BYTES + len(data)}, within its header")
    return data


def _tensor(path: Path, name: str, described: Any, start: int, size: int) -> StoredTensor:
    what = f"{path}: tensor {name!r:.200}"
    if not _is_unicode(name):
        raise InvalidArgumentError(f"{what} has a name that is not Unicode")
    fields: Mapping[str, Any] = described if isinstance(described, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise InvalidArgumentError(f"{what} has the unknown dtype {dtype!r:.80}")
    if not _are_lengths(shape) or len(shape) > _MAX_DIMENSIONS:
        raise InvalidArgumentError(f"{what} has the shape {shape!r:.80}: expected a list of lengths")
    if not _are_lengths(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidArgumentError(f"{what} has the data_offsets {offsets!r:.80}: expected where it begins and ends")
    begin, end = (start + offset for offset in offsets)
    if end > size:
        raise InvalidArgumentError(
            f"{what} ends at byte {end} of a file of {size}: the file is truncated, or its header is wrong"
        )
    num_values = _num_values(shape)
    if num_values is None or num_values * _BITS[dtype] != 8 * (end - begin):
        raise InvalidArgumentError(
            f"{what}, at byte {begin}, has {end - begin} bytes, which are not those of {dtype} {shape!r:.80}"
        )
    return StoredTensor(dtype=dtype, shape=tuple(shape), start=begin, num_bytes=end - begin)


def _are_lengths(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= _MAX_VALUES for one in value)


def _num_values(shape: list[int]) -> int | None:
    """None for more than can be counted, also of the lengths beside a zero."""
    count = 1
    for length in shape:
        count *= length or 1
        if count > _MAX_VALUES:
            return None
    return 0 if 0 in shape else count


def _check_places(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """No byte behind the header belongs to two tensors, or to none."""
    places = sorted(
        (tensor.start, tensor.start + tensor.num_bytes, f"tensor {name!r:.200}") for name, tensor in tensors.items()
    )
    ends = (start, start, "the header"), (size, size, "the end of the file")
    for (_, end, before), (begin, _, after) in itertools.pairwise([ends[0], *places, ends[1]]):
        if begin < end:
            raise InvalidArgumentError(f"{path}: {after} begins at byte {begin}, within {before}, up to byte {end}")
        if begin > end:
            raise InvalidArgumentError(
                f"{path}: the bytes {end} to {begin}, between {before} and {after}, belong to no tensor"
            )
