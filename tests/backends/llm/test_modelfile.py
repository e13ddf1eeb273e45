"""A model directory with a Modelfile: where the weights are, the engine's options, and what the config says then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from modelserver_backends.llm.backend import LlmBackend
from modelserver_backends.llm.checkpoint_place import CheckpointPlace, find_checkpoint
from support.contexts import context_of
from support.gguf_models import projector_bytes, write_gguf
from support.tiny_checkpoints import write_checkpoint

from modelserver.backend import BackendContext, ModelConfig
from modelserver.errors import ServerError

AGENT = """\
FROM ./tiny.gguf
PARAMETER num_ctx 32
PARAMETER num_thread 1
SYSTEM Be brief.
TEMPLATE \"\"\"{{ range .Messages }}{{ if .Thinking }}<think>{{ .Thinking }}</think>{{ end }}{{ .Content }}
{{- if .ToolCalls }}<tool_call>{{ range .ToolCalls }}{{ . }}{{ end }}{{ end }}{{ end }}{{ .Tools }}
{{- .Suffix }}\"\"\"
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("modelfile")
    return write_gguf(write_checkpoint(root / "source"), root / "tiny.gguf")


def context(root: Path, text: str, weights: Path, **parameters: str) -> BackendContext:
    directory = root / "m" / "1"
    directory.mkdir(parents=True)
    (directory / "Modelfile").write_text(text)
    (directory / "tiny.gguf").symlink_to(weights)
    return context_of(root / "m", config=ModelConfig(name="m", backend="llm", parameters=parameters))


def find(root: Path, text: str, weights: Path, **parameters: str) -> CheckpointPlace:
    return find_checkpoint(context(root, text, weights, **parameters))


def test_weights_and_options(tmp_path: Path, weights: Path) -> None:
    place = find(tmp_path, AGENT, weights)
    assert place.checkpoint.place == tmp_path / "m" / "1" / "tiny.gguf"
    assert (place.options.max_model_len, place.options.num_threads) == (32, 1)
    assert place.modelfile is not None
    assert place.modelfile.system == "Be brief."


def test_the_config_goes_over_the_modelfile(tmp_path: Path, weights: Path) -> None:
    assert find(tmp_path, AGENT, weights, max_model_len="16").options.max_model_len == 16


def test_a_context_longer_than_the_model_is_the_models(tmp_path: Path, weights: Path) -> None:
    place = find(tmp_path, "FROM ./tiny.gguf\nPARAMETER num_ctx 131072", weights)
    assert place.options.max_model_len is None


def test_the_template_tells_how_the_model_calls_tools_and_reasons(tmp_path: Path, weights: Path) -> None:
    asked = context(tmp_path, AGENT, weights)
    parameters = LlmBackend.complete_config(asked).parameters
    expected = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "fill_in_middle": "template"}
    assert parameters == {**expected, "max_model_len": "32"}
    own = replace(asked, config=replace(asked.config, parameters={"tool_parser": "mistral"}))
    assert LlmBackend.complete_config(own).parameters["tool_parser"] == "mistral"
    find_checkpoint(replace(asked, config=replace(asked.config, parameters=parameters)))  # a completed config is right


def test_a_directory_of_weights_below_the_model(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "m" / "weights").mkdir(parents=True)
    (tmp_path / "m" / "weights" / "tiny.gguf").symlink_to(weights)
    place = find(tmp_path, "FROM ../weights", weights)
    assert place.checkpoint.place.parent == tmp_path / "m" / "weights"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM llama3:8b", "FROM llama3:8b: there is no directory and no .gguf file"),
        ("FROM ../../elsewhere.gguf", "FROM ../../elsewhere.gguf is outside"),
        ("FROM /etc/passwd", "FROM /etc/passwd is outside"),
        ("FROM ./Modelfile", "there is no directory and no .gguf file"),
        ("FROM .\nADAPTER ./lora.gguf", "there is neither a file"),
        ("FROM .\nFROM ./mmproj.gguf", "FROM ./mmproj.gguf: there is no directory and no .gguf file"),
        ("FROM .\nFROM .", "has several FROM lines: expected one model, and its projectors"),
        ("FROM .\nPARAMETER top_k x", "Modelfile (line 2): invalid integer value 'x'"),
        ("FROM .\nTEMPLATE {{ if }}", "the model's template, line 1, column 7: missing value"),
    ],
)
def test_what_cannot_be_served(tmp_path: Path, weights: Path, text: str, message: str) -> None:
    with pytest.raises(ServerError) as caught:
        find(tmp_path, text, weights)
    assert message in caught.value.message
    assert caught.value.message.startswith("model 'm' version 1: ")


def test_a_projector_beside_the_model_is_passed_over(
    tmp_path: Path, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = context(tmp_path, "FROM ./mmproj.gguf\nFROM ./tiny.gguf", weights)
    (tmp_path / "m" / "1" / "mmproj.gguf").write_bytes(projector_bytes())
    assert find_checkpoint(asked).checkpoint.place.name == "tiny.gguf"
    assert "the model reads text only" in caplog.text


def test_two_descriptions_are_one_too_many(tmp_path: Path, weights: Path) -> None:
    asked = context(tmp_path, "FROM .", weights)
    (asked.version_directory / "model.json").write_text("{}")
    with pytest.raises(ServerError, match=r"holds both model\.json and Modelfile"):
        find_checkpoint(asked)


def test_only_a_modelfile_of_the_command_line_may_name_any_path(tmp_path: Path, weights: Path) -> None:
    directory = tmp_path / "given"
    directory.mkdir()
    (directory / "Modelfile.tiny").write_text(f"FROM {weights}\n")
    config = ModelConfig(name="tiny", backend="llm", default_model_filename="Modelfile.tiny")
    asked = replace(context_of(directory, config=config), version_directory=directory)
    assert find_checkpoint(asked).checkpoint.place == weights
    with pytest.raises(ServerError, match="is outside"):
        find_checkpoint(replace(asked, is_uploaded=True))
