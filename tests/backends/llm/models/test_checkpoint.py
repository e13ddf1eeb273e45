"""Files of weights: shards, wrappers' names, and what is said of those that are missing or broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from safetensors.torch import save_file
from support.generations import generate, loaded_engine
from support.tiny_checkpoints import reference_model, reference_tokens

from modelserver.backend import InvalidArgumentError


def test_shards_are_read_through_their_index(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint("llama")
    reference_model(directory).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with loaded_engine(tmp_path) as engine:
        tokens = generate(engine, [[9, 10, 11]], 5)[0][0]
    assert tokens == reference_tokens(directory, [9, 10, 11], 5)


@pytest.mark.parametrize("prefix", ["", "model.", "transformer.", "language_model.model.", "model.language_model."])
def test_names_are_those_inside_the_decoder(prefix: str, tmp_path: Path) -> None:
    save_file({f"{prefix}layers.0.mlp.up_proj.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as files:
        assert files.names() == ["layers.0.mlp.up_proj.weight"]
        assert files.shape("layers.0.mlp.up_proj.weight") == (2, 3)


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no safetensors in"):
        open_checkpoint(tmp_path).names()
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors: its first 8 bytes announce a header of"):
        open_checkpoint(tmp_path).names()
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with (
        open_checkpoint(tmp_path) as files,
        pytest.raises(InvalidArgumentError, match=r"no tensor embed_tokens\.weight"),
    ):
        files.tensor("embed_tokens.weight")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"head.weight": "model.safetensors"}}))
    with pytest.raises(InvalidArgumentError, match=r"places head\.weight in model\.safetensors, which lacks it"):
        open_checkpoint(tmp_path).names()
    index.write_text("{}")
    with pytest.raises(InvalidArgumentError, match="is not a safetensors index"):
        open_checkpoint(tmp_path).names()
