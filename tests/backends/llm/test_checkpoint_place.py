"""Where a checkpoint is found, and its options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm.backend import LlmBackend
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.checkpoint_place import CheckpointPlace, find_checkpoint, longest_of
from modelserver_backends.llm.contract import Purpose
from support.contexts import context_of
from support.gguf_models import write_gguf
from support.tiny_checkpoints import write_checkpoint

from modelserver.backend import ModelConfig
from modelserver.errors import ConfigError, NotFoundError, ServerError

CONFIG = {"model_type": "llama", "max_position_embeddings": 64}
ENCODER = {"model_type": "bert", "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    return write_gguf(write_checkpoint(root / "source"), root / "tiny.gguf")


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)


def find(root: Path, default_model_filename: str = "", **parameters: str) -> CheckpointPlace:
    config = ModelConfig(name="m", backend="llm", parameters=parameters, default_model_filename=default_model_filename)
    return find_checkpoint(context_of(root / "m", config=config))


def test_the_version_directory_is_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", config=CONFIG)
    place = find(tmp_path, max_num_seqs="4", enable_prefix_caching="false", tool_parser="hermes")
    assert place.checkpoint.place == tmp_path / "m" / "1"
    assert (place.options.max_num_seqs, place.options.enable_prefix_caching) == (4, False)


@pytest.mark.parametrize("is_relative", [False, True])
def test_model_json_names_a_directory(tmp_path: Path, is_relative: bool) -> None:
    write(tmp_path / "weights", config=CONFIG)
    name = "../../weights" if is_relative else str(tmp_path / "weights")
    write(tmp_path / "m" / "1", model={"model": name, "max_num_seqs": 4, "seed": 3, "disable_log_stats": True})
    place = find(tmp_path, max_num_seqs="8")
    assert place.checkpoint.place.resolve() == tmp_path / "weights"
    assert (place.options.max_num_seqs, place.options.seed) == (8, 3)


@pytest.mark.parametrize("revision", [None, "main", "refs/pr/1", "c0ffee"])
def test_model_json_may_name_a_model_of_the_hub_that_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """Triton's published vllm_model does: it is served as it is where `hf download` has put the checkpoint."""
    cache = tmp_path / "hub"
    write(cache / "models--facebook--opt-125m" / "snapshots" / "c0ffee", config=CONFIG)
    for name in ("main", "refs/pr/1"):
        reference = cache / "models--facebook--opt-125m" / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text("c0ffee")
    asked = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5, "enforce_eager": True}
    write(tmp_path / "m" / "1", model=asked if revision is None else {**asked, "revision": revision})
    found = cache / "models--facebook--opt-125m" / "snapshots" / "c0ffee"
    with monkeypatch.context() as environment:
        environment.setenv("HF_HUB_CACHE", str(cache))
        assert find(tmp_path).checkpoint.place == found
        write(tmp_path / "m" / "1", model={**asked, "revision": "other"})
        with pytest.raises(NotFoundError, match=f"no downloaded model of that name .* in {cache}"):
            find(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    write(tmp_path / "m" / "1", model=asked)
    assert find(tmp_path).checkpoint.place == found
    write(tmp_path / "m" / "1", model={**asked, "download_dir": str(tmp_path / "elsewhere")})
    with pytest.raises(NotFoundError, match="Nothing is downloaded"):
        find(tmp_path)


@pytest.mark.parametrize("name", ["../hub/x", "facebook/../x", "/facebook/opt-125m", "a/b/c"])
def test_only_names_of_the_hub_are_looked_for_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "main", config=CONFIG)
    write(tmp_path / "m" / "1", model={"model": name})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(NotFoundError, match="Nothing is downloaded"):
        find(tmp_path)


def test_model_json_may_stand_beside_the_checkpoint_and_have_another_name(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", config=CONFIG, engine={"max_num_seqs": 2})
    place = find(tmp_path, default_model_filename="engine.json")
    assert (place.checkpoint.place, place.options.max_num_seqs) == (tmp_path / "m" / "1", 2)


@pytest.mark.parametrize(("given", "expected"), [("64", None), ("32", 32)])
def test_the_checkpoints_own_length_is_not_insisted_on(tmp_path: Path, given: str, expected: int | None) -> None:
    write(tmp_path / "m" / "1", config=CONFIG)
    assert find(tmp_path, max_model_len=given).options.max_model_len == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_positions": 8}, 8),
        ({"text_config": {"max_position_embeddings": 16}}, 16),
        ({}, None),
        ({"n_ctx": "x"}, None),
    ],
)
def test_the_length_is_read_from_the_config(tmp_path: Path, config: Any, expected: int | None) -> None:
    write(tmp_path, config={"model_type": "llama", **config})
    assert longest_of(open_checkpoint(tmp_path)) == expected


@pytest.mark.parametrize(
    ("files", "parameters", "kind", "message"),
    [
        ({}, {}, NotFoundError, "holds no config.json (there is nothing)"),
        ({"other": {}}, {}, NotFoundError, "(there is other.json)"),
        ({"model": "{"}, {}, ConfigError, "model.json is not JSON"),
        ({"model": []}, {}, ConfigError, "expected a JSON object, got list"),
        ({"model": {"model": 3}}, {}, ConfigError, "expected the path of a directory, got 3"),
        ({"model": {"model": "Org/Name"}}, {}, NotFoundError, "Nothing is downloaded"),
        ({"config": CONFIG, "model": {"max_num_seq": 3}}, {}, ConfigError, "did you mean 'max_num_seqs'?"),
        ({"config": CONFIG}, {"max_num_seqs": "many"}, ConfigError, "'max_num_seqs' must be an integer"),
        ({"config": CONFIG}, {"block_sise": "16"}, ConfigError, "did you mean 'block_size'?"),
        ({"config": CONFIG}, {"gpu_memory_utilization": "2"}, ConfigError, "above 0 and at most 1"),
        ({"config": "{"}, {}, ConfigError, "config.json is not JSON"),
        ({"config": {}}, {}, ConfigError, "config.json has no model_type"),
        ({"config": ENCODER}, {"pooling": "all"}, ConfigError, "'pooling' must be one of cls, max, mean"),
        ({"config": ENCODER}, {"normalize": "maybe"}, ConfigError, "'normalize' must be true or false"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, files: dict[str, object], parameters: dict[str, str], kind: type[ServerError], message: str
) -> None:
    write(tmp_path / "m" / "1", **files)
    with pytest.raises(kind) as caught:
        find(tmp_path, **parameters)
    assert message in caught.value.message
    assert "model 'm' version 1" in caught.value.message


@pytest.mark.parametrize(
    ("files", "parameters", "message"),
    [
        (
            {"config": {**ENCODER, "architectures": ["BertForQuestionAnswering"]}},
            {},
            "holds a BertForQuestionAnswering",
        ),
        ({"config": ENCODER, "modules": [{"path": "", "type": "a.WordEmbeddings"}]}, {}, "WordEmbeddings"),
        ({"config": ENCODER}, {"default_prompt_name": "query"}, "this checkpoint has the prompts none"),
    ],
)
def test_an_encoder_that_cannot_be_served_is_known_before_its_weights_are(
    tmp_path: Path, files: dict[str, object], parameters: dict[str, str], message: str
) -> None:
    write(tmp_path / "m" / "1", **files)
    with pytest.raises(ServerError) as caught:
        find(tmp_path, **parameters)
    assert message in caught.value.message


def test_an_encoder_is_known_by_its_config(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", config=ENCODER, sentence_bert_config={"max_seq_length": 32})
    place = find(tmp_path, max_model_len="32", pooling="auto", normalize="auto")
    assert (place.purpose, place.options.max_model_len, place.options.pooling) == (Purpose.EMBED, None, None)
    assert longest_of(place.checkpoint) == 32


def test_a_file_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", config=CONFIG)
    with pytest.raises(NotFoundError, match=r"no file .*engine\.json"):
        find(tmp_path, default_model_filename="engine.json")


def test_a_lone_gguf_file_is_the_checkpoint(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    path = shutil.copy(gguf_file, tmp_path / "m" / "1" / "tiny.Q8_0.gguf")
    place = find(tmp_path, max_num_seqs="4")
    assert (place.checkpoint.place, place.options.max_num_seqs) == (path, 4)
    assert (longest_of(place.checkpoint), place.purpose) == (512, Purpose.GENERATE)


def test_a_gguf_file_may_be_named(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf_file, tmp_path / "m" / "1" / name)
    with pytest.raises(ConfigError, match=r"model 'm' version 1: .* several GGUF files \(a\.gguf, b\.gguf\)"):
        find(tmp_path)
    assert find(tmp_path, default_model_filename="b.gguf").checkpoint.place.name == "b.gguf"
    write(tmp_path / "m" / "1", model={"model": "a.gguf", "max_num_seqs": 3, "load_format": "gguf"})
    place = find(tmp_path)
    assert (place.checkpoint.place.name, place.options.max_num_seqs) == ("a.gguf", 3)
    write(tmp_path / "m" / "1", model={"model": "c.gguf"})
    with pytest.raises(NotFoundError, match=r"'model': there is no file .*c\.gguf"):
        find(tmp_path)
    write(tmp_path / "m" / "1", model={"model": "a.gguf", "tokenizer": "Org/Name"})
    with pytest.raises(ConfigError, match="a GGUF file has a tokenizer of its own"):
        find(tmp_path)


def test_a_broken_gguf_file_is_known_before_its_weights_are(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1")
    (tmp_path / "m" / "1" / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model 'm' version 1: .*weights\.gguf: its version, at byte 4, would end"):
        find(tmp_path)


def test_a_chat_template_says_how_calls_are_written_unless_the_config_does(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m" / "1")
    template = "{% for call in messages[0].tool_calls %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    plain = ModelConfig(name="m", backend="llm")
    assert LlmBackend.complete_config(context_of(tmp_path / "m", config=plain)).parameters["tool_parser"] == "hermes"
    said = ModelConfig(name="m", backend="llm", parameters={"tool_parser": "mistral"})
    assert LlmBackend.complete_config(context_of(tmp_path / "m", config=said)).parameters["tool_parser"] == "mistral"
