"""Checkpoints of AutoAWQ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm.quantization import find_scheme
from support.float_twins import assert_is_its_twin
from support.generations import generate, loaded_engine, random_prompts
from support.quantized_checkpoints import (
    VALUES,
    Packed,
    change_tensors,
    groups_of,
    meant,
    rounded,
    words,
    write_quantized,
)
from support.tiny_checkpoints import reference_tokens, write_checkpoint

from modelserver.backend import InvalidArgumentError, UnsupportedError

pytestmark = pytest.mark.usefixtures("rows_in_floats")

UP = "model.layers.0.mlp.up_proj"
# The gemm layout: nibble i of a word is output _OUTPUTS[i] of its eight.
_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]


def by_outputs(codes: torch.Tensor) -> torch.Tensor:
    """[rows, outputs] -> [rows, outputs / 8]"""
    return words(codes.unflatten(1, (-1, 8))[:, :, _OUTPUTS].flatten(1), 4)


def packer(version: str, group_size: int, *, has_zeros: bool = True) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros = rounded(weight, 4, group_size, is_symmetric=not has_zeros)
        dense = meant(codes, scales, zeros, groups_of(weight.shape[1], group_size))
        if version == "gemm":
            stored = {"qweight": by_outputs(codes.t()), "scales": scales.t()}
            return (stored | {"qzeros": by_outputs(zeros.t())} if has_zeros else stored), dense
        # A row's zero points fill whole words: 4 of them in groups of 32.
        padding = (0, 32 - zeros.shape[1])
        zeros, scales = (torch.nn.functional.pad(one, padding) for one in (zeros, scales))
        return {"qweight": words(codes, 4), "scales": scales, "qzeros": words(zeros, 4)}, dense

    return pack


def fast(weight: torch.Tensor) -> Packed:
    """gemv_fast in groups of 32, by where each code goes: in which word, and in which of its halves of bytes."""
    codes, scales, zeros = rounded(weight, 4, 32, is_symmetric=False)
    outputs, inputs = weight.shape
    scales = scales.half()
    added = -(scales.float() * zeros).half()
    each = torch.arange(32)
    pair = each % 8 // 2 * 8 + each // 8 * 2 + each % 2  # pairs of all eighths side by side
    place = pair // 8 * 8 + pair % 2 * 4 + pair % 8 // 2  # and of eight the even ones first
    row, column = torch.meshgrid(torch.arange(outputs), torch.arange(inputs), indexing="ij")
    flat = row % 4 * 64 + column % 64 // 32 * 32 + place[column % 32]
    packed = torch.zeros(outputs // 4, inputs, dtype=torch.int32)
    packed.index_put_((row // 4, column // 64 * 64 + flat // 4), (codes.long() << flat % 4 * 4).int(), accumulate=True)
    packed = torch.where(packed >= 1 << 15, packed - (1 << 16), packed).short()
    padding = (0, 32 - scales.shape[1])
    stored = {"qweight": packed} | {
        name: torch.nn.functional.pad(one, padding).t() for name, one in (("scales", scales), ("qzeros", added))
    }
    spread = groups_of(inputs, 32)
    return stored, scales.float()[:, spread] * codes + added.float()[:, spread]


def config(version: str = "gemm", group_size: int = 32, **entries: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": version, **entries}


def test_gemv_fast_is_its_float_twin(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    assert_is_its_twin(*write_quantized(source, tmp_path, fast, config("gemv_fast")))


@pytest.mark.parametrize("family", ["llama", "llama_tied_biased", "qwen3_moe", "phi3"])
def test_gemm_is_its_float_twin(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", family, values=VALUES)
    skipped = (UP, "model.layers.1.self_attn.k_proj")
    packed, twin = write_quantized(
        source,
        tmp_path,
        packer("gemm", 32),
        config(zero_point=True, modules_to_not_convert=list(skipped)),
        skipped=skipped,
    )
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize(
    ("version", "group_size", "has_zeros"), [("gemm", -1, True), ("gemm", 16, False), ("gemv", 32, True)]
)
def test_every_layout_is_its_float_twin(version: str, group_size: int, has_zeros: bool, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    pack = packer(version, group_size, has_zeros=has_zeros)
    packed, twin = write_quantized(source, tmp_path, pack, config(version.upper(), group_size, zero_point=has_zeros))
    assert_is_its_twin(packed, twin)


@pytest.mark.slow
def test_each_rank_has_its_share(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, packer("gemm", 32), config())
    prompts = random_prompts(2)
    with loaded_engine(packed, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, prompts, 4)
    assert [tokens for tokens, _ in results] == [reference_tokens(twin, prompt, 4) for prompt in prompts]


def test_a_config_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    """As the first checkpoints of this format have it."""
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, packer("gemm", 32), config())
    entries = json.loads((packed / "config.json").read_text())
    del entries["quantization_config"]
    (packed / "config.json").write_text(json.dumps(entries))
    described = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (packed / "quant_config.json").write_text(json.dumps(described))
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"bits": 3}, "bits 3 of awq is not supported: expected 4"),
        ({"version": "marlin"}, "version 'marlin' of awq is not supported: expected gemm, gemv, gemv_fast"),
        ({"group_size": None}, "group_size of awq must be an integer"),
    ],
)
def test_variants_that_are_not_read_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, InvalidArgumentError), match=message):
        find_scheme(None, {"quantization_config": config(**entries)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": torch.zeros(64, 15, dtype=torch.int32)}, r"up_proj\.qweight of shape \[64, 15\].*\[64, 16\]"),
        ({"qzeros": None}, r"no tensor layers\.0\.mlp\.up_proj\.qzeros"),
        ({"qzeros": torch.zeros(2, 16, dtype=torch.int64)}, r"up_proj\.qzeros in int64, expected int32"),
        ({"scales": torch.zeros(4, 128)}, r"up_proj\.scales of shape \[4, 128\]"),
    ],
)
def test_a_wrong_tensor_is_named(changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, _ = write_quantized(source, tmp_path, packer("gemm", 32), config())
    change_tensors(packed, {f"{UP}.{suffix}": tensor for suffix, tensor in changes.items()})
    with pytest.raises(InvalidArgumentError, match=message), loaded_engine(packed):
        pass
