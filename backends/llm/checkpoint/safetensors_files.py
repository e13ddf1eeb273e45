"""The tensors of a directory: those of one safetensors file, or of shards that an index names; read, and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from modelserver.backend import InvalidArgumentError

from .checkpoint import file_stamp
from .safetensors_header import StoredTensor, read_headers

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

    What is read from a mapped file would stay in this process's memory until it is closed, beside what is made of it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, FileIO] = {}
        # By the names inside the decoder: the file, the name there, and where its bytes are.
        self._places: dict[str, tuple[Path, str, StoredTensor]] = {
            inner_name(name): (path, name, tensor) for name, (path, tensor) in read_headers(directory).items()
        }
        self._modules = {
            name.rpartition(".")[0]: stored.rpartition(".")[0] for name, (_, stored, _) in self._places.items()
        }

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._places.clear()

    def add_to_digest(self, update: Callable[[bytes], None]) -> None:
        for path in sorted({path for path, _, _ in self._places.values()}):
            update(f"{path.name} {file_stamp(path.stat())}".encode())
        for name, (path, stored, tensor) in sorted(self._places.items()):
            update(f"{name} {path.name} {stored} {tensor}".encode())

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return sorted(self._places)

    def module(self, name: str) -> str | None:
        return self._modules.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name)[2].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of what is read for rare ones too."""
        kind = self._place(name)[2].dtype
        return _DTYPES[kind] if kind in _DTYPES else self.tensor(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        path, stored, place = self._place(name)
        dtype = _DTYPES.get(place.dtype)
        if dtype is None:
            return _rare_tensor(path, stored, place.dtype)
        return self._read(path, stored, place.start, torch.empty(place.shape, dtype=dtype))

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        path, stored, place = self._place(name)
        dtype = _DTYPES.get(place.dtype)
        if dtype is None:
            return self.tensor(name)[first : first + count]
        tensor = torch.empty(count, *place.shape[1:], dtype=dtype)
        return self._read(path, stored, place.start + first * place.num_bytes // place.shape[0], tensor)

    def _read(self, path: Path, stored: str, start: int, tensor: torch.Tensor) -> torch.Tensor:
        """All of a tensor, from a byte of the file on."""
        if not tensor.numel():
            return tensor
        if path not in self._files:
            self._files[path] = path.open("rb", buffering=0)
        file, view = self._files[path], memoryview(tensor.view(-1).view(torch.uint8).numpy())
        file.seek(start)
        while view:
            num_read = file.readinto(view)
            if not num_read:
                raise InvalidArgumentError(f"{path} ends within the tensor {stored}")
            view = view[num_read:]
        return tensor

    def _place(self, name: str) -> tuple[Path, str, StoredTensor]:
        try:
            return self._places[name]
        except KeyError:
            raise InvalidArgumentError(
                f"the checkpoint in {self._directory} has no tensor {name}: its weights do not belong to its "
                "config.json"
            ) from None


def _rare_tensor(path: Path, name: str, dtype: str) -> torch.Tensor:
    """As the library reads it."""
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(f"{path}: tensor {name}, in {dtype}, cannot be read: {error}") from None
    return tensor


def inner_name(name: str) -> str:
    """A module's or tensor's name inside the decoder."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


SAFETENSORS_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 2 << 30


class SafetensorsWriter:
    """`total` are the bytes of all tensors so far. `finish` gives the files their names."""

    def __init__(self, directory: Path) -> None:
        self.total = 0
        self._directory = directory
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._held[name] = tensor.contiguous()
        self.total += tensor.nbytes
        self._held_bytes += tensor.nbytes
        if self._held_bytes > _SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        """One file is model.safetensors; several are named as other servers expect them, by an index."""
        if self._held or not self._shards:
            self._write()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        places: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            path = self._directory / f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(path)
            places |= dict.fromkeys(names, path.name)
        index = {"metadata": {"total_size": self.total}, "weight_map": places}
        (self._directory / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._held, self._path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._directory / f"model-{number + 1:05}.safetensors"
