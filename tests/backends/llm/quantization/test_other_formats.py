"""Checkpoints of bitsandbytes, torchao and EXL2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.float_twins import assert_is_its_twin
from support.generations import generate, loaded_engine, random_prompts
from support.quantized_checkpoints import (
    VALUES,
    Packed,
    change_tensors,
    float8,
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


def eight_bits(weight: torch.Tensor) -> Packed:
    """bitsandbytes: the largest value of each output is 127."""
    largest = weight.abs().amax(dim=1)
    codes = (weight * 127 / largest[:, None]).round()
    stored = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return stored, codes * (largest / 127)[:, None]


def four_bits(kind: str, *, is_nested: bool) -> Callable[[torch.Tensor], Packed]:
    """bitsandbytes: indices into 16 values, the first in the high half of a byte, in blocks of 64 weights."""
    table = torch.linspace(-1, 1, 16) ** 3

    def pack(weight: torch.Tensor) -> Packed:
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(dim=1)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        stored = {"weight.absmax": largest, "weight.quant_map": table}
        if is_nested:
            nested_table, offset = torch.linspace(-1, 1, 256), float(largest.mean())
            padded = torch.nn.functional.pad(largest - offset, (0, -largest.numel() % 256)).view(-1, 256)
            scales = padded.abs().amax(dim=1)
            codes = ((padded / scales[:, None])[..., None] - nested_table).abs().argmin(dim=-1)
            flat = codes.flatten()[: largest.numel()]
            largest = nested_table[flat] * scales.repeat_interleave(256)[: largest.numel()] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            stored = {"weight.absmax": flat.to(torch.uint8), "weight.quant_map": table}
            stored |= {"weight.nested_absmax": scales, "weight.nested_quant_map": nested_table}
        codes = ((blocks / largest[:, None])[..., None] - table).abs().argmin(dim=-1)
        flat = codes.flatten().to(torch.uint8)
        stored["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
        described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = described
        return stored, (table[codes] * largest[:, None]).view(weight.shape)

    return pack


def integers_of_torchao(group_size: int, *, is_symmetric: bool) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros = rounded(weight, 8, group_size, is_symmetric=is_symmetric, scale_dtype=torch.float32)
        stored = {"_weight_qdata": (codes - 128).to(torch.int8), "_weight_scale": scales}
        if not is_symmetric:
            stored["_weight_zero_point"] = (zeros - 128).to(torch.int8)
        return stored, meant(codes, scales, zeros, groups_of(weight.shape[1], group_size))

    return pack


def int4_of_torchao(weight: torch.Tensor) -> Packed:
    """Int4Tensor in groups of 32: signed codes in halves of bytes, times a scale, and added to the group's middle."""
    blocks = weight.unflatten(1, (-1, 32))
    least, most = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
    scales = (most - least).clamp(min=1e-6) / 15
    middle = least + scales * 8
    codes = ((blocks - middle) / scales).round().clamp(-8, 7)
    bits = codes.flatten(1).to(torch.int8) & 15
    stored = {"_weight_qdata": bits[:, ::2] | bits[:, 1::2] << 4}
    stored |= {"_weight_scale": scales[..., 0].t(), "_weight_zero_point": middle[..., 0].t()}
    return {name: tensor.contiguous() for name, tensor in stored.items()}, (codes * scales + middle).flatten(1)


def floats_of_torchao(weight: torch.Tensor) -> Packed:
    codes, scales, dense = float8(weight, (1, weight.shape[1]))
    return {"_weight_qdata": codes, "_weight_scale": scales}, dense


def exl2(weight: torch.Tensor) -> Packed:
    """64 inputs are two groups in 5 and 4 bits; more are groups in 8, 4, 3 and 2."""
    inputs = weight.shape[1]
    rest = inputs - 64
    lengths = [32, 32, *([rest // 2] * 2 if rest >= 64 else [rest] * bool(rest))]
    widths = [8, 4, 3, 2][: len(lengths)] if len(lengths) > 2 else [5, 4]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    rows, groups, steps, largest, dense = [], [], [], [], torch.empty_like(weight)
    start = 0
    for bits, length in zip(widths, lengths, strict=True):
        columns = order[start : start + length]
        part, top = weight[:, columns], 1 << (bits - 1)
        wanted = part.abs().amax(dim=1) / top
        most = wanted.max().half()
        step = ((wanted / most.float()).sqrt() * 16).ceil().clamp(1, 16).long() - 1
        scales = (step.float() + 1).square() * (most.float() / 256)
        codes = ((part / scales[:, None]).round() + top).clamp(0, 2 * top - 1).long()
        dense[:, columns] = (codes - top).float() * scales[:, None]
        groups += [bits, sum(len(one) for one in rows)]
        rows.append(words(codes, bits).t())
        steps.append(words(step[None], 4))
        largest.append(most)
        start += length
    stored = {"q_weight": torch.cat(rows), "q_groups": torch.tensor(groups, dtype=torch.int16)}
    stored |= {"q_scale": torch.cat(steps), "q_scale_max": torch.stack(largest)}
    return {**stored, "q_invperm": order.argsort().int()}, dense


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Packed], str]] = {
    "bitsandbytes int8": (eight_bits, "bitsandbytes"),
    "bitsandbytes nf4": (four_bits("nf4", is_nested=False), "bitsandbytes"),
    "bitsandbytes fp4 nested": (four_bits("fp4", is_nested=True), "bitsandbytes"),
    "torchao int8": (integers_of_torchao(-1, is_symmetric=True), "torchao"),
    "torchao groups": (integers_of_torchao(32, is_symmetric=False), "torchao"),
    "torchao int4": (int4_of_torchao, "torchao"),
    "torchao float8": (floats_of_torchao, "torchao"),
    "exl2": (exl2, "exl2"),
}


def written(form: str, root: Path, family: str = "llama", skipped: tuple[str, ...] = ()) -> tuple[Path, Path]:
    source = write_checkpoint(root / "source", family, values=VALUES)
    pack, method = FORMATS[form]
    return write_quantized(source, root, pack, {"quant_method": method}, skipped=skipped)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_its_float_twin(form: str, tmp_path: Path) -> None:
    assert_is_its_twin(*written(form, tmp_path, skipped=(UP,)))


@pytest.mark.parametrize("form", ["bitsandbytes nf4", "exl2"])
def test_fused_layers_and_biases_are_their_float_twin(form: str, tmp_path: Path) -> None:
    assert_is_its_twin(*written(form, tmp_path, "llama_tied_biased"))


# One of them in each run is that of tests/backends/llm/quantization/test_gptq.py.
@pytest.mark.slow
@pytest.mark.parametrize("form", ["bitsandbytes nf4", "bitsandbytes int8", "torchao groups"])
def test_each_rank_has_its_share(form: str, tmp_path: Path) -> None:
    packed, twin = written(form, tmp_path)
    prompts = random_prompts(2)
    with loaded_engine(packed, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, prompts, 4)
    assert [tokens for tokens, _ in results] == [reference_tokens(twin, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("bitsandbytes int8", {"SCB": torch.ones(3)}, r"up_proj\.SCB of shape \[3\]"),
        ("bitsandbytes int8", {"SCB": None}, r"up_proj\.weight in int8, expected float32"),
        (
            "bitsandbytes nf4",
            {"weight.quant_state.bitsandbytes__nf4": torch.tensor([123], dtype=torch.uint8)},
            "up_proj.* is not JSON",
        ),
        (
            "bitsandbytes nf4",
            {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"blocksize": 0}'), dtype=torch.uint8)},
            "blocksize of .*up_proj's quant_state must be a positive integer, got 0",
        ),
        ("bitsandbytes nf4", {"weight": torch.zeros(5, 1, dtype=torch.uint8)}, r"up_proj\.weight of shape \[5, 1\]"),
        ("torchao int8", {"_weight_scale": torch.ones(3, 1)}, r"up_proj\._weight_scale has the shape \[3, 1\]"),
        ("torchao int8", {"_weight_qdata": torch.ones(128, 8, dtype=torch.int32)}, "up_proj._weight_qdata is packed"),
        ("torchao int4", {"_weight_act_pre_scale": torch.ones(64)}, "up_proj._weight_act_pre_scale: factors of rows"),
        (
            "torchao int4",
            {"_weight_zero_point": torch.ones(1, 128)},
            "_zero_point must have the shape of _weight_scale",
        ),
        ("exl2", {"q_groups": torch.tensor([3, 0], dtype=torch.int16)}, "up_proj.q_groups describe 96 inputs"),
        ("exl2", {"q_groups": torch.tensor([4, 3, 9, 0], dtype=torch.int16)}, "up_proj.q_groups do not describe"),
        ("exl2", {"q_scale_max": torch.ones(1, dtype=torch.float16)}, r"up_proj\.q_scale_max of shape \[1\]"),
        ("exl2", {"q_weight": torch.ones(1, 1, dtype=torch.int32)}, r"up_proj\.q_weight has the shape \[1, 1\]"),
    ],
)
def test_a_wrong_tensor_is_named(
    form: str, changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    packed, _ = written(form, tmp_path)
    change_tensors(packed, {f"{UP}.{suffix}": tensor for suffix, tensor in changes.items()})
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=message), loaded_engine(packed):
        pass
