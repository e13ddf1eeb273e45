"""Matrices that the formats' own libraries wrote, and what these libraries make of them, bit for bit.

Written by compressed-tensors 0.20, torchao 0.18 and bitsandbytes 0.50; those of GPTQ and AWQ are random words that
GPTQModel 7.7 and AutoAWQ 0.2.9 unpacked.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, LinearTensors, torch.Tensor]]:
    """A golden matrix by its name: the tensors of its layer, and the weights that they stand for."""
    name = request.param
    with safe_open(GOLDEN, framework="pt") as file:
        names = [key for key in file.keys() if key.startswith(f"{name}|")]  # noqa: SIM118 - it is no mapping
        tensors = {key.split("|")[1]: file.get_tensor(key) for key in names}
    expected = tensors.pop("=")
    save_file({f"m.{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        layer = LinearTensors(
            checkpoint=checkpoint,
            parts=(PART,),
            split=Split.WHOLE,
            rank=Rank(),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        yield name, layer, expected


def scheme_of(config: Any) -> StoredScheme:
    scheme = find_scheme(None, {"quantization_config": config})
    assert isinstance(scheme, StoredScheme)
    return scheme


@pytest.mark.parametrize("stored", CONFIGS, indirect=True)
def test_weights_are_those_that_the_library_reads(stored: tuple[str, LinearTensors, torch.Tensor]) -> None:
    name, layer, expected = stored
    scheme = scheme_of(CONFIGS[name])
    if name.startswith("bitsandbytes"):  # which becomes floats: rows of one 1 each give its weights
        found = scheme.linear(layer)(torch.eye(PART.num_inputs), None).t()
    else:
        found = scheme.read(layer, PART).dequantized()
    assert torch.equal(found.to(expected.dtype), expected)


@pytest.mark.parametrize(
    ("stored", "kind", "expected"),
    [("fp8 channel", "float", torch.float8_e4m3fn), ("int8 zeros", "int", torch.int8), ("fp8 channel", None, None)],
    indirect=["stored"],
)
def test_rows_are_rounded_where_the_config_says_so(
    stored: tuple[str, LinearTensors, torch.Tensor], kind: str | None, expected: torch.dtype | None
) -> None:
    name, layer, _ = stored
    config = copy.deepcopy(CONFIGS[name])
    if kind is not None:
        config["config_groups"]["g"]["input_activations"] = {"num_bits": 8, "type": kind, "dynamic": True}
    assert scheme_of(config).read(layer, PART).activations is expected
