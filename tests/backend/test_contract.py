"""What the contract gives a backend author: typed parameters and the place of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.contexts import context_of

from modelserver.backend import BackendContext, ConfigError, ModelConfig, NotFoundError


def context(value: str) -> BackendContext:
    return context_of(Path("/models/m"), config=ModelConfig(parameters={"key": value}))


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes", "on"])
def test_words_for_true(text: str) -> None:
    assert context(text).bool_parameter("key") is True


@pytest.mark.parametrize("text", ["false", "0", "No", "off"])
def test_words_for_false(text: str) -> None:
    assert context(text).bool_parameter("key", True) is False


def test_numbers() -> None:
    assert context(" 12 ").int_parameter("key") == 12
    assert context("1.5").float_parameter("key") == 1.5


@pytest.mark.parametrize("value", ["", " "])
def test_what_is_left_out_is_the_default(value: str) -> None:
    empty = context(value)
    assert (empty.int_parameter("key", 3), empty.float_parameter("key", 0.5), empty.bool_parameter("key", True)) == (
        3,
        0.5,
        True,
    )
    assert empty.parameter("other", "default") == "default"


@pytest.mark.parametrize(
    ("method", "expected"),
    [("int_parameter", "a whole number"), ("float_parameter", "a number"), ("bool_parameter", "true or false")],
)
def test_what_is_neither_is_named(method: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"model 'm': parameter key: expected {expected}, got 'much'"):
        getattr(context("much"), method)("key")


def test_a_model_file_is_the_default_or_the_configs(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    for name in ("model.x", "other.x"):
        (tmp_path / "1" / name).touch()
    assert context_of(tmp_path, config=ModelConfig()).model_file("model.x").name == "model.x"
    chosen = ModelConfig(default_model_filename="other.x")
    assert context_of(tmp_path, config=chosen).model_file("model.x").name == "other.x"
    with pytest.raises(NotFoundError, match=r"no file .*/1/missing.x"):
        context_of(tmp_path, config=ModelConfig()).model_file("missing.x")
