"""Checkpoints in the formats of quantized weights, each beside its float twin: the weights that it stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

# What is stored of a matrix, by the suffix of its name, and the matrix that it stands for.
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
# Widths that groups of 32 divide.
VALUES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}


def write_quantized(
    source: Path,
    root: Path,
    pack: Callable[[torch.Tensor], Packed],
    config: Mapping[str, Any],
    *,
    skipped: tuple[str, ...] = (),
    has_head: bool = False,
) -> tuple[Path, Path]:
    """A checkpoint with each linear layer in the form that `pack` gives it, and its float twin.

    `skipped` modules stay in floats, as do the head (but for `has_head`), embeddings and routers.
    """
    packed, twin = root / "packed", root / "twin"
    for directory in (packed, twin):
        shutil.copytree(source, directory)
    stored: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_kept = module in skipped or "embed" in name or module.endswith((".mlp.gate", "block_sparse_moe.gate"))
        if tensor.dim() != 2 or is_kept or (module == "lm_head" and not has_head):
            stored[name] = floats[name] = tensor
            continue
        parts, floats[name] = pack(tensor.float())
        stored |= {f"{module}.{suffix}": part.contiguous().clone() for suffix, part in parts.items()}
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, twin / "model.safetensors", metadata={"format": "pt"})
    entries = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**entries, "quantization_config": dict(config)}))
    return packed, twin


def change_tensors(directory: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replaces tensors of a checkpoint; None removes one."""
    path = directory / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(path), **changes}
    save_file({name: one.contiguous() for name, one in tensors.items() if one is not None}, path)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, count] as a stream of bits in int32 words, bit by bit: [rows, words]."""
    stream = (codes.numpy().astype(np.int64)[..., None] >> np.arange(bits)) & 1
    flat = stream.reshape(codes.shape[0], -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view(np.int32).copy())


def rounded(
    weight: torch.Tensor, bits: int, group_size: int, *, is_symmetric: bool, scale_dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [outputs, inputs] from 0, scales and zero points [outputs, groups] of weights rounded group by group."""
    grouped = weight.unflatten(1, (-1, weight.shape[1] if group_size == -1 else group_size))
    top = (1 << bits) - 1
    if is_symmetric:
        scales = (grouped.abs().amax(dim=2) / (top / 2)).to(scale_dtype)
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
        scales = ((high - low) / top).to(scale_dtype)
        zeros = (-low / scales.float()).round().clamp(1, top).long()
    codes = ((grouped / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top).long()
    return codes.flatten(1), scales, zeros


def meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """The weights that codes stand for; `group_of` [inputs] says which group an input is of."""
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def groups_of(num_inputs: int, group_size: int) -> torch.Tensor:
    return torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)


def float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes in e4m3, scales for each block of outputs and inputs, and the weights that they stand for."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // block[0]), -(-inputs // block[1])
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[:outputs, :inputs] = weight
    scales = padded.view(rows, block[0], columns, block[1]).abs().amax(dim=(1, 3)) / 448
    each = scales.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)[:outputs, :inputs]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * each


# The values of the codes of e2m1.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest values."""
    return (values[..., None] - E2M1).abs().argmin(dim=-1).to(torch.uint8)


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of four bits in each byte: the even ones are the low halves."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, scales in e4m3 for 16 inputs, the scale that all are multiplied with, and what they stand for."""
    whole = weight.abs().max() / (448 * 6)
    grouped = weight.unflatten(1, (-1, 16))
    scales = (grouped.abs().amax(dim=2) / 6 / whole).to(torch.float8_e4m3fn)
    each = (scales.float() * whole)[..., None]
    codes = e2m1_codes(torch.where(each > 0, grouped / each, 0.0))
    return halves(codes.flatten(1)), scales, whole, (E2M1[codes.long()] * each).flatten(1)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, exponents of powers of two for 32 inputs, and what they stand for."""
    grouped = weight.unflatten(1, (-1, 32))
    exponents = (grouped.abs().amax(dim=2) / 6).log2().ceil()
    each = torch.exp2(exponents)[..., None]
    codes = e2m1_codes(grouped / each)
    return halves(codes.flatten(1)), (exponents + 127).to(torch.uint8), (E2M1[codes.long()] * each).flatten(1)
