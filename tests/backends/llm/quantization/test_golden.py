"""Matrices that the formats' own libraries wrote, and what these libraries make of them, bit for bit.

Written by compressed-tensors 0.20, torchao 0.18 and bitsandbytes 0.50; those of GPTQ and AWQ are random words that
GPTQModel 7.7 and AutoAWQ 0.2.9 unpacked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.models.linear_tensors import LinearTensors, Part, Rank, Split
from modelserver_backends.llm.quantization import find_scheme
from modelserver_backends.llm.quantization.stored import StoredScheme
from safetensors import safe_open
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "golden.safetensors"
PART = Part("m", 64, (32,))
with safe_open(GOLDEN, framework="pt") as opened:
    CONFIGS = {name: json.loads(described) for name, described in sorted(opened.metadata().items())}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_that_the_library_reads(name: str, tmp_path: Path) -> None:
    with safe_open(GOLDEN, framework="pt") as file:
        names = [key for key in file.keys() if key.startswith(f"{name}|")]  # noqa: SIM118 - it is no mapping
        tensors = {key.split("|")[1]: file.get_tensor(key) for key in names}
    expected = tensors.pop("=")
    save_file({f"m.{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors")
    scheme = find_scheme(None, {"quantization_config": CONFIGS[name]})
    assert isinstance(scheme, StoredScheme)
    with open_checkpoint(tmp_path) as checkpoint:
        layer = LinearTensors(
            checkpoint=checkpoint,
            parts=(PART,),
            split=Split.WHOLE,
            rank=Rank(),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        if name.startswith("bitsandbytes"):  # which becomes floats: rows of one 1 each give its weights
            found = scheme.linear(layer)(torch.eye(PART.num_inputs), None).t()
        else:
            found = scheme.read(layer, PART).dequantized()
    assert torch.equal(found.to(expected.dtype), expected)
