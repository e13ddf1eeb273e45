"""Writes the tensors of a checkpoint as safetensors, in files of a few GiB, so that one file's are in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
