"""What sentence-transformers writes beside a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.embedding.layout import EmbeddingLayout, pooling_of, read_layout

from modelserver.errors import InvalidArgumentError, ServerError, UnsupportedError

MEANS = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}


def modules(*kinds: str, package: str = "sentence_transformers.models") -> list[dict[str, Any]]:
    return [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"{package}.{kind}"}
        for at, kind in enumerate(kinds)
    ]


def write(root: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return root


@pytest.mark.parametrize(
    ("files", "pooling", "num_dense", "is_normalised"),
    [
        ({}, ("mean",), 0, True),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, ("cls",), 0, True),
        ({"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": MEANS}, ("mean",), 0, False),
        (
            {
                "modules.json": modules("Transformer", "Pooling", "Dense", "Dropout", "Dense", "Normalize"),
                "1_Pooling/config.json": {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
            },
            ("cls", "max"),
            2,
            True,
        ),
        (
            {
                "modules.json": modules(
                    "Transformer", "Pooling", "Normalize", package="sentence_transformers.base.new"
                ),
                "1_Pooling/config.json": {"embedding_dimension": 8, "pooling_mode": "lasttoken"},
            },
            ("last",),
            0,
            True,
        ),
        (
            {"1_Pooling/config.json": {"pooling_mode": ["mean", "mean_sqrt_len_tokens"]}},
            ("mean", "mean_sqrt_len"),
            0,
            True,
        ),
    ],
)
def test_pooling_dense_layers_and_normalisation(
    tmp_path: Path, files: dict[str, Any], pooling: tuple[str, ...], num_dense: int, is_normalised: bool
) -> None:
    layout = read_layout(open_checkpoint(write(tmp_path, files)), default="mean")
    assert (layout.pooling, len(layout.dense), layout.is_normalised) == (pooling, num_dense, is_normalised)


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"modules.json": "{"}, InvalidArgumentError, "modules.json cannot be read as JSON"),
        ({"modules.json": {}}, InvalidArgumentError, "must hold a JSON array"),
        ({"modules.json": ["x"]}, InvalidArgumentError, 'a type and a path, got "x"'),
        ({"modules.json": modules("Transformer")}, UnsupportedError, "has no Pooling"),
        ({"modules.json": modules("Transformer", "Dense")}, UnsupportedError, 'module 1 is "Dense"'),
        ({"modules.json": modules("Transformer", "Pooling", "CNN")}, UnsupportedError, 'module 2 is "CNN"'),
        ({"modules.json": modules("Transformer", "Pooling", "Normalize", "Dense")}, UnsupportedError, "module 3"),
        ({"modules.json": [{"path": "0_BERT", "type": "a.Transformer"}]}, UnsupportedError, "lies in 0_BERT"),
        ({"1_Pooling/config.json": {"pooling_mode_magic": True}}, UnsupportedError, 'pooling "magic"'),
        ({"1_Pooling/config.json": {"pooling_mode": [3]}}, UnsupportedError, "pooling 3"),
        ({"1_Pooling/config.json": []}, InvalidArgumentError, "must hold a JSON object"),
    ],
)
def test_what_cannot_be_done_is_named(
    tmp_path: Path, files: dict[str, Any], kind: type[ServerError], message: str
) -> None:
    write(tmp_path, {"1_Pooling/config.json": MEANS})
    with pytest.raises(kind) as caught:
        read_layout(open_checkpoint(write(tmp_path, files)), default="mean")
    assert message in caught.value.message


def test_prompts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    described = {"prompts": {"query": "query: ", "none": None}, "default_prompt_name": "query"}
    files = {"config_sentence_transformers.json": described, "sentence_bert_config.json": {"do_lower_case": True}}
    layout = read_layout(open_checkpoint(write(tmp_path, files)), default="last")
    assert (layout.prompt(None), layout.pooling, layout.is_lowercase) == ("query: ", ("last",), True)
    with pytest.raises(InvalidArgumentError, match='"passage": this checkpoint has the prompts query'):
        layout.prompt("passage")
    assert EmbeddingLayout(pooling=("mean",)).prompt(None) == ""


def test_prompts_that_are_not_pooled_are_not_used(tmp_path: Path) -> None:
    files = {
        "config_sentence_transformers.json": {"prompts": {"query": "query: ", "": ""}},
        "1_Pooling/config.json": {**MEANS, "include_prompt": False},
    }
    layout = read_layout(open_checkpoint(write(tmp_path, files)), default="mean")
    assert layout.prompt(None) == ""
    with pytest.raises(UnsupportedError, match="include_prompt false"):
        layout.prompt("query")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("CLS", "cls"), ("last-token", "last"), ("lasttoken", "last"), ("Mean", "mean"), ("all", None)],
)
def test_pooling_has_many_names(name: str, expected: str | None) -> None:
    assert pooling_of(name) == expected
