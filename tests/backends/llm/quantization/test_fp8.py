"""Checkpoints in FP8, and those of ModelOpt."""

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
from support.quantized_checkpoints import VALUES, Packed, change_tensors, float8, nvfp4, write_quantized
from support.tiny_checkpoints import reference_tokens, write_checkpoint

from modelserver.backend import InvalidArgumentError, UnsupportedError

pytestmark = pytest.mark.usefixtures("rows_in_floats")

UP = "model.layers.0.mlp.up_proj"


def packer(name: str, block: str) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        outputs, inputs = weight.shape
        sizes = {"row": (1, inputs), "tensor": (outputs, inputs), "block": (32, 32), "large": (128, 128)}
        codes, scales, dense = float8(weight, sizes[block])
        stored = scales.reshape(()) if block == "tensor" else scales
        return {"weight": codes, name: stored, "input_scale": torch.ones(())}, dense

    return pack


def floats_4(weight: torch.Tensor) -> Packed:
    halves, scales, whole, dense = nvfp4(weight)
    return {"weight": halves, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.ones(())}, dense


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
OPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize("family", ["llama", "llama_tied_biased", "qwen3_moe", "phi3"])
def test_blocks_are_their_float_twin(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", family, values=VALUES)
    packed, twin = write_quantized(source, tmp_path, packer("weight_scale_inv", "block"), BLOCKS, skipped=(UP,))
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize(
    ("pack", "config"),
    [
        (packer("weight_scale", "tensor"), {"quant_method": "fp8", "activation_scheme": "static"}),
        (packer("weight_scale_inv", "tensor"), {"quant_method": "fp8"}),
        (packer("weight_scale", "row"), {"quant_method": "fbgemm_fp8"}),
        (packer("weight_scale", "tensor"), OPT),
        (packer("weight_scale", "row"), {**OPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
        (floats_4, {**OPT, "quant_algo": "NVFP4"}),
    ],
    ids=["fp8 tensor", "fp8 tensor inverse", "fbgemm row", "modelopt tensor", "modelopt row", "modelopt nvfp4"],
)
def test_every_layout_is_its_float_twin(
    pack: Callable[[torch.Tensor], Packed], config: dict[str, Any], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, pack, config, skipped=(UP,))
    assert_is_its_twin(packed, twin)


def test_blocks_of_modelopt_are_their_float_twin(tmp_path: Path) -> None:
    """Their length is not in the config: it is 128. The last blocks are not full."""
    values = {**VALUES, "hidden_size": 192, "intermediate_size": 320}
    source = write_checkpoint(tmp_path / "source", "llama", values=values)

    def pack(weight: torch.Tensor) -> Packed:
        stored, dense = packer("weight_scale", "large")(weight)
        return {**stored, "weight_scale": stored["weight_scale"][:, None, :, None]}, dense

    packed, twin = write_quantized(source, tmp_path, pack, {**OPT, "quant_algo": "FP8_PB_WO"})
    assert_is_its_twin(packed, twin)


@pytest.mark.slow
def test_each_rank_has_its_share(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, packer("weight_scale_inv", "block"), BLOCKS)
    prompts = random_prompts(2)
    with loaded_engine(packed, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, prompts, 4)
    assert [tokens for tokens, _ in results] == [reference_tokens(twin, prompt, 4) for prompt in prompts]


def test_a_config_of_modelopt_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, floats_4, OPT)
    entries = json.loads((packed / "config.json").read_text())
    del entries["quantization_config"]
    (packed / "config.json").write_text(json.dumps(entries))
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (packed / "hf_quant_config.json").write_text(json.dumps(described))
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**BLOCKS, "fmt": "e5m2"}, "fmt 'e5m2' of fp8 is not supported: expected e4m3"),
        ({**BLOCKS, "weight_block_size": [128]}, "weight_block_size of fp8 must be two lengths"),
        ({**OPT, "quant_algo": "W4A8_AWQ"}, "quant_algo 'w4a8_awq' of modelopt is not supported"),
        ({"quant_method": "modelopt"}, "quant_algo 'unnamed' of modelopt is not supported"),
    ],
)
def test_variants_that_are_not_read_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, InvalidArgumentError), match=message):
        find_scheme(None, {"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (BLOCKS, {"weight_scale_inv": torch.ones(4, 3)}, r"weight_scale_inv has the shape \[4, 3\], expected \[4, 2\]"),
        (BLOCKS, {"weight_scale_inv": None}, r"up_proj\.weight in float8_e4m3fn, expected float32"),
        (BLOCKS, {"weight": torch.zeros(128, 64, dtype=torch.float8_e5m2)}, r"in float8_e5m2, expected float8_e4m3fn"),
    ],
)
def test_a_wrong_tensor_is_named(
    config: dict[str, Any], changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, _ = write_quantized(source, tmp_path, packer("weight_scale_inv", "block"), config)
    change_tensors(packed, {f"{UP}.{suffix}": tensor for suffix, tensor in changes.items()})
    with pytest.raises(InvalidArgumentError, match=message), loaded_engine(packed):
        pass


def test_scales_for_inputs_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, _ = write_quantized(source, tmp_path, floats_4, {**OPT, "quant_algo": "NVFP4"})
    change_tensors(packed, {f"{UP}.pre_quant_scale": torch.ones(64)})
    message = r"up_proj\.pre_quant_scale, a scale for inputs, is not supported"
    with pytest.raises(UnsupportedError, match=message), loaded_engine(packed):
        pass
