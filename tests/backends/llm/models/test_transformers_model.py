"""Checkpoints that transformers would load and that would write nonsense are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from modelserver_backends.llm.models.transformers_model import load_transformers
from safetensors.torch import load_file, save_file

from modelserver.backend import InvalidArgumentError, ServerError, UnsupportedError


def refusal(directory: Path) -> ServerError:
    import torch

    config = json.loads((directory / "config.json").read_text())
    with pytest.raises(ServerError) as caught:
        load_transformers(directory, config, dtype=torch.float32, device=torch.device("cpu"))
    return caught.value


def test_weights_that_are_missing_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "granite"
    shutil.copytree(checkpoint("granite"), directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    error = refusal(directory)
    assert isinstance(error, InvalidArgumentError)
    assert "lacks 1 of its weights: model.layers.0.mlp.up_proj.weight" in error.message


def test_an_encoder_is_no_causal_model(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path)
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "looks at tokens that come later" in error.message


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "own.py").write_text("raise SystemExit('this was run')")
    assert isinstance(refusal(tmp_path), UnsupportedError)
