"""The weight format of docs/add-a-weight-format.md, installed from outside of the tree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.generations import generate, loaded_engine, random_prompts
from support.packages import installed_from
from support.tiny_checkpoints import reference_logprobs, reference_tokens

from modelserver.backend import InvalidArgumentError, UnsupportedError

PAGE = "add-a-weight-format.md"
PROMPTS = random_prompts(4)
IGNORED = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture
def package(tmp_path: Path) -> Iterator[str]:
    with installed_from(PAGE, tmp_path / "site") as name:
        yield name


def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What is stored of a matrix, and the matrix that it stands for."""
    scales = (weight.abs().amax(dim=1) / 7).half()
    codes = ((weight / scales.float()[:, None]).round().clamp(-8, 7) + 8).to(torch.uint8)
    stored = {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scales": scales}
    return stored, (codes.float() - 8) * scales.float()[:, None]


def quantized(source: Path, root: Path, **config: Any) -> tuple[Path, Path]:
    """The checkpoint in the format of the page, and its float twin."""
    packed, twin = root / "packed", root / "twin"
    for directory in (packed, twin):
        shutil.copytree(source, directory)
    tensors, stored, floats = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or module in IGNORED or module.endswith(".mlp.gate"):
            stored[name] = floats[name] = tensor
            continue
        parts, floats[name] = pack(tensor)
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, twin / "model.safetensors", metadata={"format": "pt"})
    entries = json.loads((packed / "config.json").read_text())
    described = {"quant_method": "rowwise4", "bits": 4, "ignore": list(IGNORED), **config}
    (packed / "config.json").write_text(json.dumps({**entries, "quantization_config": described}))
    return packed, twin


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("family", ["llama", "llama_tied_biased", "qwen3_moe", "phi3"])
def test_its_logits_are_those_of_its_float_twin(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Fused layers of ignored and packed parts, tied and own heads, and experts, whose routers are read as floats."""
    packed, twin = quantized(checkpoint(family), tmp_path)
    with loaded_engine(packed, block_size=8) as engine:
        results = generate(engine, PROMPTS, 6)
    for prompt, (tokens, logprobs) in zip(PROMPTS, results, strict=True):
        assert tokens == reference_tokens(twin, prompt, 6)
        expected = reference_logprobs(twin, prompt + tokens)[len(prompt) - 1 : -1]
        assert logprobs == pytest.approx(
            [float(row[token]) for row, token in zip(expected, tokens, strict=True)], abs=1e-3
        )


@pytest.mark.usefixtures("package")
def test_each_rank_has_its_share(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    packed, twin = quantized(checkpoint("llama"), tmp_path)
    with loaded_engine(packed, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, PROMPTS[:2], 4)
    assert [tokens for tokens, _ in results] == [reference_tokens(twin, prompt, 4) for prompt in PROMPTS[:2]]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {"bits": 3}, "rowwise4 of 3 bits is not supported"),
        ({"quantization": "int8"}, {}, "'int8' was asked for, but the checkpoint's weights are 'rowwise4'"),
    ],
)
def test_what_it_does_not_read_is_refused(
    options: dict[str, Any], config: dict[str, Any], message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    packed, _ = quantized(checkpoint("llama"), tmp_path, **config)
    with pytest.raises(UnsupportedError, match=message), loaded_engine(packed, **options):
        pass


@pytest.mark.usefixtures("package")
def test_plain_weights_are_not_made_into_it(checkpoint: Callable[[str], Path]) -> None:
    with (
        pytest.raises(UnsupportedError, match="'rowwise4' is not supported; on plain weights there is: int8"),
        loaded_engine(checkpoint("llama"), quantization="rowwise4"),
    ):
        pass


@pytest.mark.usefixtures("package")
def test_a_tensor_of_another_shape_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    packed, _ = quantized(checkpoint("llama"), tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.codes"
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, packed / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"layers\.0\.mlp\.up_proj\.codes of shape"), loaded_engine(packed):
        pass


def test_without_it_there_is_no_such_format(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    packed, _ = quantized(checkpoint("llama"), tmp_path)
    with pytest.raises(UnsupportedError, match="quantization 'rowwise4' is not supported"), loaded_engine(packed):
        pass
