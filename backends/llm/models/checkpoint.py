"""Tensors of a Hugging Face checkpoint: one safetensors file, or shards that an index names."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from modelserver.backend import InvalidArgumentError

_INDEX = "model.safetensors.index.json"
# What wrappers put before the names of the decoder inside; the longest first.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "transformer.", "model.")


class Checkpoint:
    """Reads tensors by name, one at a time, from files mapped into memory. Use as a context manager.

    Names are those inside the decoder: `layers.0.mlp.up_proj.weight`, whatever wraps it in the file.
    InvalidArgumentError for files that are missing or broken, and for tensors that are not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        for path, names in _files(directory).items():
            file = self._files[path] = _open(path)
            present = set(file.keys())
            for name in names if names is not None else present:
                if name not in present:
                    raise InvalidArgumentError(f"{directory / _INDEX} places {name} in {path.name}, which lacks it")
                self._places[_inner(name)] = (path, name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._places.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return sorted(self._places)

    def tensor(self, name: str) -> torch.Tensor:
        path, stored = self._place(name)
        return self._files[path].get_tensor(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        path, stored = self._place(name)
        return tuple(self._files[path].get_slice(stored).get_shape())

    def _place(self, name: str) -> tuple[Path, str]:
        try:
            return self._places[name]
        except KeyError:
            raise InvalidArgumentError(
                f"the checkpoint in {self.directory} has no tensor {name}: its weights do not belong to its config.json"
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
            raise InvalidArgumentError(f"{index} is no index of safetensors: {error!r}") from None
        return {directory / name: tensors for name, tensors in files.items()}
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise InvalidArgumentError(
            f"no safetensors in {directory}: convert its weights (save_pretrained(..., safe_serialization=True))"
        )
    return dict.fromkeys(found)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as safetensors: {error}") from None
