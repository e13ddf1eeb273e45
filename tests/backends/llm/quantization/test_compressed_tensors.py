"""Checkpoints of llm-compressor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    float8,
    groups_of,
    meant,
    mxfp4,
    nvfp4,
    rounded,
    words,
    write_quantized,
)
from support.tiny_checkpoints import reference_tokens, write_checkpoint

from modelserver.backend import InvalidArgumentError, UnsupportedError

pytestmark = pytest.mark.usefixtures("rows_in_floats")

UP = "model.layers.0.mlp.up_proj"


def packed_integers(
    bits: int, group_size: int, *, is_symmetric: bool = True, is_ordered: bool = False
) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        order = order if is_ordered else torch.arange(weight.shape[1])
        ordered, scales, zeros = rounded(
            weight[:, order], bits, group_size, is_symmetric=is_symmetric, scale_dtype=torch.bfloat16
        )
        group_of, codes = torch.empty_like(order), torch.empty_like(ordered)
        group_of[order] = groups_of(weight.shape[1], group_size)
        codes[:, order] = ordered
        stored = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            stored["weight_zero_point"] = words(zeros.t(), bits).t()
        if is_ordered:
            stored["weight_g_idx"] = group_of.int()
        return stored, meant(codes, scales, zeros, group_of)

    return pack


def integers(group_size: int, *, is_symmetric: bool = True) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros = rounded(weight, 8, group_size, is_symmetric=is_symmetric, scale_dtype=torch.float32)
        stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not is_symmetric:
            stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return stored, meant(codes, scales, zeros, groups_of(weight.shape[1], group_size))

    return pack


def floats_8(block: str) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        outputs, inputs = weight.shape
        sizes = {"channel": (1, inputs), "tensor": (outputs, inputs), "block": (32, 48)}
        codes, scales, dense = float8(weight, sizes[block])
        stored = {"weight": codes, "weight_scale": scales.reshape(1) if block == "tensor" else scales}
        return {**stored, "input_scale": torch.ones(1)}, dense

    return pack


def floats_4_of_16(weight: torch.Tensor) -> Packed:
    halves, scales, whole, dense = nvfp4(weight)
    return {"weight_packed": halves, "weight_scale": scales, "weight_global_scale": 1 / whole.reshape(1)}, dense


def floats_4_of_32(weight: torch.Tensor) -> Packed:
    halves, exponents, dense = mxfp4(weight)
    return {"weight_packed": halves, "weight_scale": exponents}, dense


def floats_8_of_32(weight: torch.Tensor) -> Packed:
    grouped = weight.unflatten(1, (-1, 32))
    exponents = (grouped.abs().amax(dim=2) / 448).log2().ceil()
    each = torch.exp2(exponents)[..., None]
    codes = (grouped / each).to(torch.float8_e4m3fn)
    stored = {"weight": codes.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
    return stored, (codes.float() * each).flatten(1)


def group(
    bits: int = 4, kind: str = "int", *, targets: tuple[str, ...] = ("Linear",), **weights: Any
) -> dict[str, Any]:
    return {"targets": list(targets), "weights": {"num_bits": bits, "type": kind, "symmetric": True, **weights}}


def config(form: str, *groups: Mapping[str, Any], **entries: Any) -> dict[str, Any]:
    named = {f"group_{index}": dict(one) for index, one in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": named,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **entries,
    }


OF_32 = {"strategy": "group", "group_size": 32}
FORMS: dict[str, tuple[Callable[[torch.Tensor], Packed], dict[str, Any]]] = {
    "packed 4": (packed_integers(4, 32), config("pack-quantized", group(**OF_32))),
    "packed 4 channel": (packed_integers(4, -1), config("pack-quantized", group(strategy="channel"))),
    "packed 4 zeros": (
        packed_integers(4, 32, is_symmetric=False),
        config("pack-quantized", group(**OF_32, symmetric=False)),
    ),
    "packed 4 ordered": (
        packed_integers(4, 32, is_symmetric=False, is_ordered=True),
        config("pack-quantized", group(**OF_32, symmetric=False, actorder="group")),
    ),
    "packed 3": (packed_integers(3, 32), config("pack-quantized", group(3, **OF_32))),
    "packed 8": (packed_integers(8, -1), config("pack-quantized", group(8, strategy="channel"))),
    "int8 channel": (integers(-1), config("int-quantized", group(8, strategy="channel"))),
    "int8 zeros": (
        integers(-1, is_symmetric=False),
        config("int-quantized", group(8, strategy="channel", symmetric=False)),
    ),
    "int8 group": (integers(32), config("naive-quantized", group(8, **OF_32))),
    "fp8 channel": (floats_8("channel"), config("float-quantized", group(8, "float", strategy="channel"))),
    "fp8 tensor": (floats_8("tensor"), config("float-quantized", group(8, "float", strategy="tensor"))),
    "fp8 block": (
        floats_8("block"),
        config("float-quantized", group(8, "float", strategy="block", block_structure=[32, 48])),
    ),
    "nvfp4": (
        floats_4_of_16,
        config("nvfp4-pack-quantized", group(4, "float", strategy="tensor_group", group_size=16)),
    ),
    "mxfp4": (floats_4_of_32, config("mxfp4-pack-quantized", group(4, "float", **OF_32))),
    "mxfp8": (floats_8_of_32, config("mxfp8-quantized", group(8, "float", **OF_32, scale_dtype="torch.uint8"))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_its_float_twin(form: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    pack, described = FORMS[form]
    packed, twin = write_quantized(source, tmp_path, pack, described, skipped=(UP,))
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize("family", ["llama_tied_biased", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("form", ["packed 4 zeros", "fp8 channel"])
def test_fused_layers_biases_and_experts_are_their_float_twin(form: str, family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", family, values=VALUES)
    packed, twin = write_quantized(source, tmp_path, *FORMS[form], skipped=("model.layers.1.self_attn.k_proj",))
    assert_is_its_twin(packed, twin)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed 4 zeros", "int8 channel", "fp8 tensor", "nvfp4"])
def test_each_rank_has_its_share(form: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, twin = write_quantized(source, tmp_path, *FORMS[form])
    prompts = random_prompts(2)
    with loaded_engine(packed, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, prompts, 4)
    assert [tokens for tokens, _ in results] == [reference_tokens(twin, prompt, 4) for prompt in prompts]


def test_groups_have_forms_of_their_own(tmp_path: Path) -> None:
    """A module's own name goes before a pattern, and a pattern before its class."""
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    first = "model.layers.0.mlp.gate_proj"
    described = config(
        "mixed-precision",
        group(3, strategy="channel"),
        group(8, "float", targets=(r"re:.*self_attn\.[qkv]_proj",), strategy="channel"),
        group(4, targets=(r"re:.*\.mlp\..*", r"re:.*o_proj"), **OF_32),
        group(8, targets=(first,), strategy="channel"),
    )

    def pack(weight: torch.Tensor) -> Packed:
        return forms[next(names)](weight)

    forms = {"float": floats_8("channel"), "int": packed_integers(4, 32), "own": packed_integers(8, -1)}
    from safetensors.torch import load_file

    tensors = [name for name in load_file(source / "model.safetensors") if "_proj" in name]
    kinds = ["float" if name[-13:-8] in "q_projk_projv_proj" and "self_attn" in name else "int" for name in tensors]
    kinds = ["int" if "o_proj" in name else kind for name, kind in zip(tensors, kinds, strict=True)]
    kinds = ["own" if name.startswith(first) else kind for name, kind in zip(tensors, kinds, strict=True)]
    names = iter(kinds)
    packed, twin = write_quantized(source, tmp_path, pack, described)
    assert_is_its_twin(packed, twin)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (config("marlin-24", group()), "format 'marlin-24' of compressed-tensors is not supported"),
        (config("dense", group(), sparsity_config={"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'"),
        (config("dense", group(), transform_config={"config_groups": {}}), "transform_config .* is not supported"),
        (config("pack-quantized", group(9)), r"num_bits 9 of compressed-tensors' group_0 is not supported"),
        (config("pack-quantized", group(6, "float")), r"num_bits 6 .* is not supported: expected 4, 8"),
        (config("pack-quantized", group(strategy="group")), "group_size of .* must be an integer, got None"),
        (config("pack-quantized", group(4, "float", strategy="group", group_size=64)), "groups of 64"),
        (config("pack-quantized", group(8, "float", strategy="block", block_structure=[1])), "block_structure"),
        (config("pack-quantized", group(), config_groups=[1]), "config_groups must be an object"),
        (config("pack-quantized", group(), ignore="lm_head"), "ignore must be a list of names"),
    ],
)
def test_variants_that_are_not_read_are_refused(described: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, InvalidArgumentError), match=message):
        find_scheme(None, {"quantization_config": described})


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("packed 4", {"weight_packed": torch.zeros(128, 7, dtype=torch.int32)}, r"weight_packed of shape \[128, 7\]"),
        ("packed 4", {"weight_shape": torch.tensor([64, 128])}, r"weight_shape says \[64, 128\], expected \[128, 64\]"),
        ("packed 4", {"weight_scale": torch.zeros(128, 4)}, r"weight_scale of shape \[128, 4\]"),
        ("packed 4 zeros", {"weight_zero_point": None}, r"no tensor layers\.0\.mlp\.up_proj\.weight_zero_point"),
        ("packed 4 ordered", {"weight_g_idx": torch.zeros(64, dtype=torch.int32)}, r"weight_g_idx must place 32"),
        ("int8 channel", {"weight": torch.zeros(128, 64)}, r"up_proj\.weight in float32, expected int8"),
        ("int8 channel", {"weight_scale": torch.zeros(3)}, r"weight_scale has the shape \[3\]"),
        ("int8 channel", {"weight_scale": None}, r"up_proj\.weight in int8, expected float32"),
        ("fp8 block", {"weight_scale": torch.zeros(4, 1)}, r"weight_scale has the shape \[4, 1\], expected \[4, 2\]"),
        ("nvfp4", {"weight_global_scale": torch.zeros(2)}, r"weight_global_scale must hold one scale"),
        ("mxfp4", {"weight_scale": torch.zeros(128, 2)}, r"weight_scale in float32, expected uint8"),
    ],
)
def test_a_wrong_tensor_is_named(
    form: str, changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    packed, _ = write_quantized(source, tmp_path, *FORMS[form])
    change_tensors(packed, {f"{UP}.{suffix}": tensor for suffix, tensor in changes.items()})
    with pytest.raises(InvalidArgumentError, match=message) as caught, loaded_engine(packed):
        pass
    assert "layers.0.mlp.up_proj" in caught.value.message


def test_a_module_that_no_group_names_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    described = config("pack-quantized", group(**OF_32, targets=(r"re:.*self_attn.*",)))
    packed, _ = write_quantized(source, tmp_path, packed_integers(4, 32), described)
    message = r"layers\.0\.mlp\.\w+ has scales, but no group"
    with pytest.raises(InvalidArgumentError, match=message), loaded_engine(packed):
        pass
