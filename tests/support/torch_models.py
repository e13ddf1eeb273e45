"""Small PyTorch models, scripted or exported into a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


class SumAndDifference(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return left + right, left - right


class FromDict(nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"total": tensors["a"] + tensors["b"], "double": tensors["a"] * 2}


class Copy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Doubling(nn.Module):
    """Writes into its input, as careless models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class MaskedScale(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 3.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x * scale if mask is None else x * scale * mask


class Greeting(nn.Module):
    """Strings go in and out beside a tensor."""

    def forward(self, names: list[str], times: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        return ["hello " + name for name in names], times * 2


class Shouting(nn.Module):
    def forward(self, text: list[str]) -> list[str]:
        return [each.upper() for each in text]


class Keyworded(nn.Module):
    def forward(self, x: torch.Tensor, times: int, *, shift: torch.Tensor) -> list[torch.Tensor]:
        return [x * times + shift, (x * times).to(torch.bfloat16)]


def path_in(model_directory: Path, name: str) -> Path:
    path = model_directory / "1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_script(model_directory: Path, module: nn.Module) -> Path:
    """`module` as TorchScript; gives back the model directory."""
    torch.jit.script(module).save(str(path_in(model_directory, "model.pt")))
    return model_directory


def write_export(
    model_directory: Path, module: nn.Module, *args: Any, dynamic_shapes: Any = None, **kwargs: Any
) -> Path:
    """`module` as an exported program; gives back the model directory."""
    program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    torch.export.save(program, path_in(model_directory, "model.pt2"))
    return model_directory


def rewritten(path: Path, changes: dict[str, bytes]) -> None:
    """Replace records of a torch archive."""
    reader = torch._C.PyTorchFileReader(str(path))
    records = {name: reader.get_record(name) for name in reader.get_all_records()} | changes
    for name in ("version", ".data/version", ".data/serialization_id", "byteorder"):
        records.pop(name, None)
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, record in records.items():
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
