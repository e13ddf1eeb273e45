"""Writes one GGUF file: metadata, and tensors one after the other, so that only one is in memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .gguf_file import ValueType
from .gguf_types import TensorType

if TYPE_CHECKING:
    import torch

_VERSION = 3
_ALIGNMENT = 32

MetadataValue = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """`shape` as torch has it; the last dimension is whole blocks of the type."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count // self.kind.block_len * self.kind.block_bytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, MetadataValue],
    tensors: Sequence[WrittenTensor],
    contents: Iterable[torch.Tensor],
) -> None:
    """`contents`: the bytes of each tensor in turn, uint8 of any shape."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _entry(value))
        start = 0
        for tensor in tensors:
            lengths = tensor.shape[::-1]
            file.write(_text(tensor.name) + struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths))
            file.write(struct.pack("<IQ", tensor.kind.number, start))
            start += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
        _align(file)
        for tensor, content in zip(tensors, contents, strict=True):
            assert content.nbytes == tensor.num_bytes, f"{tensor.name}: {content.nbytes} bytes for {tensor.num_bytes}"
            file.write(content.numpy().data)
            _align(file)


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _entry(value: MetadataValue) -> bytes:
    if isinstance(value, bool | int | float | str):
        kind = _kind(value)
        return struct.pack("<I", kind) + _scalar(kind, value)
    # Numbers of tokens and their kinds are signed everywhere.
    kind = ValueType.INT32 if not value or _kind(value[0]) is ValueType.UINT32 else _kind(value[0])
    return struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)) + b"".join(_scalar(kind, each) for each in value)


def _kind(value: float | str) -> ValueType:
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, int):
        return ValueType.UINT32
    return ValueType.FLOAT32 if isinstance(value, float) else ValueType.STRING


def _scalar(kind: ValueType, value: float | str) -> bytes:
    if isinstance(value, str):
        return _text(value)
    formats = {ValueType.BOOL: "<?", ValueType.UINT32: "<I", ValueType.INT32: "<i", ValueType.FLOAT32: "<f"}
    return struct.pack(formats[kind], value)
