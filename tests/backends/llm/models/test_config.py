"""config.json as transformers writes it today, as it was written before, and as it should not be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm.checkpoint import open_checkpoint, text_config
from modelserver_backends.llm.models.decoder_config import DecoderConfig
from modelserver_backends.llm.models.families import find_family

from modelserver.backend import InvalidArgumentError, UnsupportedError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def config_of(directory: Path) -> DecoderConfig:
    checkpoint = open_checkpoint(directory)
    family = find_family(text_config(checkpoint)["model_type"])
    assert family is not None
    return family.config_of(checkpoint)


def written(directory: Path, **entries: Any) -> Path:
    kept = {name: value for name, value in {**LLAMA, **entries}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


def test_configs_from_before_transformers_5_are_read(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    config = config_of(written(tmp_path, rope_theta=5e5, rope_scaling=scaling, torch_dtype="bfloat16"))
    rope = config.ropes[0]
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor, rope.dim, config.dtype) == ("linear", 5e5, 2.0, 16, "bfloat16")
    assert (config.num_kv_heads, config.longest) == (4, 256)


def test_gemma3_of_before_has_a_base_for_each_kind_of_layer(tmp_path: Path) -> None:
    entries = {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 16, "rope_theta": 1e6}
    config = config_of(
        written(tmp_path, **entries, rope_local_base_freq=1e4, rope_scaling={"type": "linear", "factor": 8})
    )
    assert config.windows == (8, 8, 8, 8, 8, None)
    assert [(rope.theta, rope.factor) for rope in config.ropes if rope] == [(1e4, 1.0)] * 5 + [(1e6, 8.0)]


def test_the_text_part_of_a_multi_modal_model(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 16}
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "torch_dtype": "float16", "eos_token_id": 3})
    )
    config = config_of(tmp_path)
    assert (config.model_type, config.dtype, config.eos_token_ids) == ("gemma3_text", "float16", {3})


def test_qwen_slides_from_a_layer_on_if_it_says_so(tmp_path: Path) -> None:
    entries = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 4}
    assert config_of(written(tmp_path, **entries, use_sliding_window=False)).windows == (None,) * 6
    assert config_of(written(tmp_path, **entries, use_sliding_window=True)).windows == (None,) * 4 + (8, 8)


def test_generation_config_knows_the_ends_better(tmp_path: Path) -> None:
    written(tmp_path, eos_token_id=1)
    assert config_of(tmp_path).eos_token_ids == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert config_of(tmp_path).eos_token_ids == {1, 7}


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"vocab_size": None}, InvalidArgumentError, "of a llama has no vocab_size"),
        ({"model_type": None}, InvalidArgumentError, "has no model_type"),
        ({"rope_scaling": {"type": "spiral"}}, UnsupportedError, "rope_type 'spiral'"),
    ],
)
def test_what_is_wrong_is_named(entries: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        config_of(written(tmp_path, **entries))


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no config\.json"):
        config_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match="is not JSON"):
        config_of(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral", "gpt2", "bloom", "falcon", "mpt", "gpt_neo"])
def test_no_entry_can_be_such_that_the_error_names_no_file(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each entry in its turn is what it cannot be: read, or refused with the file's name; never a bare error."""
    shutil.copytree(checkpoint(family), tmp_path, dirs_exist_ok=True)
    entries = json.loads((tmp_path / "config.json").read_text())
    told: list[str] = []
    for name in sorted({*entries} - {"model_type"}):
        for value in ("x", 0, -1, None, 1.5, [], {}, True):
            (tmp_path / "config.json").write_text(json.dumps(entries | {name: value}))
            try:
                config_of(tmp_path)
            except (InvalidArgumentError, UnsupportedError) as error:
                told.append(error.message)
    assert told
    assert [message for message in told if "config.json" not in message] == []


@pytest.mark.parametrize(
    ("family", "name", "value", "words"),
    [
        ("llama", "hidden_size", "wide", "an entry that cannot be used: ValueError"),
        ("llama", "num_hidden_layers", 0, "num_layers 0: expected 1 or more"),
        ("llama", "num_key_value_heads", 3, "expected a divisor of num_heads"),
        ("gemma2", "layer_types", ["full_attention"], "windows of 1 layers: expected 2"),
        ("gemma2", "final_logit_softcapping", "x", "logit_softcap 'x': expected a number"),
        ("gemma2", "query_pre_attn_scalar", -1, "query_pre_attn_scalar less than 0"),
        ("phi3", "sliding_window", -1, "sliding_window -1"),
        ("mixtral", "num_experts_per_tok", 9, "num_experts_per_tok 9: expected 1 to num_experts"),
    ],
)
def test_numbers_that_no_network_has_are_named(
    family: str, name: str, value: Any, words: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    entries = json.loads((checkpoint(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries | {name: value}))
    with pytest.raises(InvalidArgumentError) as caught:
        config_of(tmp_path)
    assert words in caught.value.message
