"""Checkpoints of AutoGPTQ and GPTQModel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm.checkpoint.safetensors_files import SafetensorsFiles
from modelserver_backends.llm.quantization import find_scheme
from modelserver_backends.llm.quantization.awq import Awq
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


def packer(
    bits: int, group_size: int, *, is_symmetric: bool, form: str = "gptq", is_ordered: bool = False
) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        order = order if is_ordered else torch.arange(weight.shape[1])
        sorted_codes, scales, zeros = rounded(weight[:, order], bits, group_size, is_symmetric=is_symmetric)
        group_of = torch.empty_like(order)
        group_of[order] = groups_of(weight.shape[1], group_size)
        codes = torch.empty_like(sorted_codes)
        codes[:, order] = sorted_codes
        stored = {
            "qweight": words(codes, bits).t(),
            "qzeros": words((zeros - int(form == "gptq")).t() & (1 << bits) - 1, bits),
            "scales": scales.t(),
            "g_idx": group_of.int(),
        }
        return stored, meant(codes, scales, zeros, group_of)

    return pack


def config(bits: int, group_size: int, **entries: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **entries}


# The forms differ in how a zero point is stored, which families do not see: the other pairs are slow.
@pytest.mark.parametrize(
    ("form", "family"),
    [
        *(("gptq", family) for family in ("llama", "llama_tied_biased", "qwen3_moe", "phi3")),
        ("gptq_v2", "llama"),
        *(pytest.param("gptq_v2", name, marks=pytest.mark.slow) for name in ("llama_tied_biased", "qwen3_moe", "phi3")),
    ],
)
def test_four_bits_are_their_float_twin(family: str, form: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", family, values=VALUES)
    packed, twin = write_quantized(
        source,
        tmp_path,
        packer(4, 32, is_symmetric=False, form=form),
        config(4, 32, checkpoint_format=form, sym=False),
        skipped=(UP, "model.layers.1.self_attn.k_proj"),
    )
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("group_size", "is_symmetric", "is_ordered"), [(32, True, False), (-1, False, False), (32, False, True)]
)
def test_every_width_order_and_group_is_its_float_twin(
    bits: int, group_size: int, is_symmetric: bool, is_ordered: bool, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(
        source,
        tmp_path,
        packer(bits, group_size, is_symmetric=is_symmetric, is_ordered=is_ordered),
        config(bits, group_size, desc_act=is_ordered, sym=is_symmetric),
        has_head=True,
    )
    assert_is_its_twin(packed, twin)


@pytest.mark.slow
def test_each_rank_has_its_share(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, packer(4, 32, is_symmetric=False), config(4, 32))
    prompts = random_prompts(2)
    with loaded_engine(packed, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, prompts, 4)
    assert [tokens for tokens, _ in results] == [reference_tokens(twin, prompt, 4) for prompt in prompts]


def test_rules_give_modules_another_width(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(
        source,
        tmp_path,
        packer(8, -1, is_symmetric=True),
        config(4, 32, dynamic={r"+:.*\.(mlp|self_attn)\..*": {"bits": 8, "group_size": -1}}),
    )
    assert_is_its_twin(packed, twin)


def test_autoround_names_the_layout_in_which_it_packs(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    described = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    rules = {f"model.layers.{index}.{name}": {"bits": 8} for index in range(2) for name in ("mlp", "self_attn")}
    entries = {**config(4, 32), **described, "extra_config": rules}
    assert_is_its_twin(*write_quantized(source, tmp_path, packer(8, 32, is_symmetric=True), entries))
    assert isinstance(find_scheme(None, {"quantization_config": {**entries, "packing_format": "auto_round:awq"}}), Awq)
    with pytest.raises(UnsupportedError, match="packing_format 'auto_round:fp8' of auto-round is not supported"):
        find_scheme(None, {"quantization_config": {**entries, "packing_format": "auto_round:fp8"}})


def test_a_zero_point_of_nothing_wraps_around(tmp_path: Path) -> None:
    """The first version stores zero points less one: 15 stands for 0."""
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, packer(4, 32, is_symmetric=True), config(4, 32))
    ones = torch.full((2, 128 // 8), -1, dtype=torch.int32)
    change_tensors(packed, {f"{UP}.qzeros": ones})
    from safetensors.torch import load_file

    weight = load_file(twin / "model.safetensors")[f"{UP}.weight"]
    scales = load_file(packed / "model.safetensors")[f"{UP}.scales"].float().t().repeat_interleave(32, dim=1)
    change_tensors(twin, {f"{UP}.weight": weight + 8 * scales})
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"bits": 5}, r"bits 5 of gptq is not supported: expected 2, 3, 4, 8"),
        ({"bits": "four"}, r"bits of gptq must be an integer, got 'four'"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format 'marlin' of gptq is not supported"),
        ({"pack_dtype": "int16"}, r"pack_dtype 'int16' of gptq is not supported"),
        ({"dynamic": ["a"]}, r"dynamic must be an object"),
    ],
)
def test_variants_that_are_not_read_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, InvalidArgumentError), match=message):
        find_scheme(None, {"quantization_config": {**config(4, 32), **entries}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": torch.zeros(7, 128, dtype=torch.int32)}, r"up_proj\.qweight of shape \[7, 128\].*\[8, 128\]"),
        ({"qweight": torch.zeros(8, 128)}, r"up_proj\.qweight in float32, expected int32"),
        ({"scales": None}, r"no tensor layers\.0\.mlp\.up_proj\.scales"),
        ({"qzeros": torch.zeros(2, 15, dtype=torch.int32)}, r"up_proj\.qzeros of shape \[2, 15\]"),
        ({"g_idx": torch.full((64,), 5, dtype=torch.int32)}, r"up_proj\.g_idx must place 32 inputs in each of 2"),
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, r"up_proj\.g_idx must place 32 inputs in each of 2"),
        ({"qweight": None}, r"no tensor layers\.0\.mlp\.up_proj\.qweight"),
    ],
)
def test_a_wrong_tensor_is_named(changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, _ = write_quantized(source, tmp_path, packer(4, 32, is_symmetric=True), config(4, 32))
    change_tensors(packed, {f"{UP}.{suffix}": tensor for suffix, tensor in changes.items()})
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=message), loaded_engine(packed):
        pass


def test_a_wrong_tensor_is_named_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, _ = write_quantized(source, tmp_path, packer(4, 32, is_symmetric=True), config(4, 32))
    change_tensors(packed, {"model.layers.1.mlp.down_proj.scales": torch.zeros(1, 1)})
    read = SafetensorsFiles.tensor
    names: list[str] = []

    def noted(files: SafetensorsFiles, name: str) -> torch.Tensor:
        names.append(name)
        return read(files, name)

    monkeypatch.setattr(SafetensorsFiles, "tensor", noted)
    with (
        pytest.raises(InvalidArgumentError, match=r"layers\.1\.mlp\.down_proj\.scales of shape"),
        loaded_engine(packed),
    ):
        pass
    assert {name.rpartition(".")[2] for name in names if "norm" not in name} == {"g_idx"}


@pytest.mark.parametrize(
    ("group_size", "is_ordered", "message"),
    [
        pytest.param(64, False, "are not whole groups of 64", marks=pytest.mark.slow),
        pytest.param(32, True, "that are sorted by group cannot be split", marks=pytest.mark.slow),
    ],
)
def test_a_group_that_would_lie_on_two_ranks_is_refused(
    group_size: int, is_ordered: bool, message: str, tmp_path: Path
) -> None:
    values = {**VALUES, "intermediate_size": 192}
    source = write_checkpoint(tmp_path / "source", "llama", values=values)
    pack = packer(4, group_size, is_symmetric=True, is_ordered=is_ordered)
    packed, _ = write_quantized(source, tmp_path, pack, config(4, group_size, desc_act=is_ordered))
    with (
        pytest.raises(UnsupportedError, match=message),
        loaded_engine(packed, tensor_parallel_size=2, num_threads=1, block_size=8),
    ):
        pass
