"""The tensors of a directory: those of one safetensors file, or of shards that an index names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from modelserver.backend import InvalidArgumentError

_INDEX = "model.safetensors.index.json"
# What wrappers put before the names of the decoder inside; the longest first.
_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "language_model.",
    "transformer.",
    "model.",
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class SafetensorsFiles:
    """Tensors by name, each read into memory of its own. See `Checkpoint` for the names.

    InvalidArgumentError for files that are missing or broken, and for tensors that are not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, _SafetensorsFile] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        try:
            self._open(_files(directory))
        except BaseException:
            self.close()
            raise
        self._modules = {
            name.rpartition(".")[0]: stored.rpartition(".")[0] for name, (_, stored) in self._places.items()
        }

    def _open(self, files: Mapping[Path, list[str] | None]) -> None:
        for path, names in files.items():
            file = self._files[path] = _SafetensorsFile(path)
            present = file.names
            for name in names if names is not None else present:
                if name not in present:
                    raise InvalidArgumentError(
                        f"{self._directory / _INDEX} places {name} in {path.name}, which lacks it"
                    )
                self._places[_inner(name)] = (path, name)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._places.clear()

    def add_to_digest(self, update: Callable[[bytes], None]) -> None:
        for path, file in sorted(self._files.items()):
            found = path.stat()
            update(f"{path.name} {found.st_size} {found.st_mtime_ns} {file.described}".encode())

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return sorted(self._places)

    def module(self, name: str) -> str | None:
        return self._modules.get(name)

    def tensor(self, name: str) -> torch.Tensor:
        path, stored = self._place(name)
        return self._files[path].tensor(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        path, stored = self._place(name)
        return self._files[path].shape(stored)

    def dtype(self, name: str) -> torch.dtype:
        path, stored = self._place(name)
        return self._files[path].dtype(stored)

    def _place(self, name: str) -> tuple[Path, str]:
        try:
            return self._places[name]
        except KeyError:
            raise InvalidArgumentError(
                f"the checkpoint in {self._directory} has no tensor {name}: its weights do not belong to its "
                "config.json"
            ) from None


def _inner(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _files(directory: Path) -> dict[Path, list[str] | None]:
    """Each file with the names to take from it; None for all of them."""
    index = directory / _INDEX
    if index.is_file():
        try:
            places = json.loads(index.read_text())["weight_map"]
            files: dict[str, list[str]] = {}
            for tensor, name in places.items():
                files.setdefault(name, []).append(tensor)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(f"{index} is not a safetensors index: {error!r}") from None
        return {directory / name: tensors for name, tensors in files.items()}
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise InvalidArgumentError(
            f"no safetensors in {directory}: convert its weights (save_pretrained(..., safe_serialization=True))"
        )
    return dict.fromkeys(found)


class _SafetensorsFile:
    """One file, read by the offsets of its header, which the library checks.

    What is read from a mapped file would stay in this process's memory until it is closed, beside what is made of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._checked = safe_open(path, framework="pt")
            with path.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(num_bytes))
        except (OSError, SafetensorError, ValueError) as error:
            raise InvalidArgumentError(f"{path} cannot be read as safetensors: {error}") from None
        header.pop("__metadata__", None)
        self._header = header
        self._file = path.open("rb", buffering=0)
        self._start = 8 + num_bytes
        self.names: frozenset[str] = frozenset(header)

    def close(self) -> None:
        self._file.close()

    @property
    def described(self) -> str:
        """The header: each tensor's type, shape and place."""
        return json.dumps(self._header, sort_keys=True)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Of what is read for rare ones too."""
        kind = self._header[name]["dtype"]
        return _DTYPES[kind] if kind in _DTYPES else self.tensor(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        described = self._header[name]
        dtype = _DTYPES.get(described["dtype"])
        if dtype is None:
            tensor: torch.Tensor = self._checked.get_tensor(name)  # type: ignore[no-untyped-call]
            return tensor
        begin, end = described["data_offsets"]
        tensor = torch.empty(described["shape"], dtype=dtype)
        if end > begin:
            view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            self._file.seek(self._start + begin)
            while view:
                num_read = self._file.readinto(view)
                if not num_read:
                    raise InvalidArgumentError(f"{self._path} ends within the tensor {name}")
                view = view[num_read:]
        return tensor
