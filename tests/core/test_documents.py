"""YAML and JSON of operators: a field that is there twice is refused, with its lines, wherever they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelserver.core.documents import (
    RepeatedFieldError,
    beginning,
    check_fields,
    parse_json,
    parse_yaml,
    shortened,
)
from modelserver.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('{"a": 1,\n "a": 2}', (2, 1)),
        ('{"a": [1, {"b": "}{\\"[", "c": {"a": 1}}],\n"x": {"a": 1,\n\n"a": 2}}', (4, 2)),
        ('{"a": 1, "\\u0061": 2}', (1, 1)),
        ('[{"a": 1}, {"a": 1},\n {"": 1, "": 2}]', (2, 2)),
    ],
)
def test_json(text: str, lines: tuple[int, int]) -> None:
    for read in (parse_json, check_fields):
        for given in (text, text.encode()):
            with pytest.raises(RepeatedFieldError, match=r"^here: line \d+: the field '.*' is there twice") as error:
                read(given, "here")
            assert (error.value.line, error.value.first_line) == lines


def test_other_json_is_as_ever() -> None:
    text = '{"a": [1, 2.5, {"a": null, "b": {"a": true}}], "b": "\\"a\\": 1"}'
    assert parse_json(text, "here") == json.loads(text)
    with pytest.raises(ValueError, match="line 1"):
        parse_json("{", "here")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json('{"a":' * 100_000, "here")
    check_fields('{"a": ' + "1" * 5000 + "}", "here")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a: 1\nb: 2\na: 3", (3, 1)),
        ("- a: 1\n- {b: 1,\n   c: {d: 1, d: 2}}", (3, 3)),
        ("a: 1\n'a': 2", (2, 1)),
    ],
)
def test_yaml(text: str, lines: tuple[int, int]) -> None:
    with pytest.raises(RepeatedFieldError) as error:
        parse_yaml(text, "here")
    assert (error.value.line, error.value.first_line) == lines


def test_other_yaml_is_as_ever() -> None:
    """Also where a field replaces one of those that are merged in, however anchors refer to each other."""
    # PyYAML 6.0.4 takes two names of one letter for the same one, and keeps the first.
    text = "a: {x: &x {<<: &y {mine: 1, next: 2}, mine: 3}}\nb: {<<: *x, next: 4}\nc: *y"
    assert parse_yaml(text, "here") == {
        "a": {"x": {"mine": 3, "next": 2}},
        "b": {"mine": 3, "next": 4},
        "c": {"mine": 1, "next": 2},
    }


def _options(path: Path) -> Any:
    from modelserver.options.sources import read_file

    return read_file(path)


def _keys(path: Path) -> Any:
    from modelserver.auth.api_keys import read_keys

    return read_keys(path)


def _override(path: Path) -> Any:
    from modelserver.config.message import config_from_json

    return config_from_json(path.read_text())


def _credentials(path: Path) -> Any:
    from modelserver.store.cloud_uri import VARIABLE, parse_cloud_uri, storage_options

    return storage_options(parse_cloud_uri("s3://bucket/models"), {VARIABLE: str(path)})


def _bench_data(path: Path) -> Any:
    from modelserver.bench.input_data import DataOptions, read_data
    from modelserver.bench.interface import Interface

    return read_data(Interface("m", "", (), ()), DataOptions(sources=(str(path),)))


def _prompts(path: Path) -> Any:
    from modelserver.bench.llm.options import PromptOptions
    from modelserver.bench.llm.session import make_prompts

    return make_prompts(PromptOptions(file=path))


def _recorded(path: Path) -> Any:
    from modelserver.config.schema import ModelConfig
    from modelserver.toolkit.sample_files import read_requests

    return read_requests(path, ModelConfig())


def _quotas(path: Path) -> Any:
    from modelserver.auth.caller_limits import parse_limits_flag

    return parse_limits_flag("--caller-limits", path.read_text())


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (_options, "http-port: 1\nhttp-port: 2"),
        (_keys, "- {name: a, name: b}"),
        (_override, '{"max_batch_size": 1, "max_batch_size": 2}'),
        (_credentials, '{"s3": {}, "s3": {}}'),
        (_bench_data, '{"data": [{"a": [1], "a": [2]}]}'),
        (_prompts, '{"prompt": "a", "prompt": "b"}'),
        (_recorded, '{"data": [{"a": [1], "a": [2]}]}'),
        (_quotas, "concurrent=1,concurrent=2"),
    ],
)
def test_every_reader_refuses_a_field_that_is_there_twice(
    tmp_path: Path, read: Callable[[Path], Any], text: str
) -> None:
    path = tmp_path / "document"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match="there twice"):
        read(path)


@pytest.mark.parametrize(
    "value",
    [
        "a" * 500,
        ["b"] * 500,
        {f"key{number}": number for number in range(500)},
        [[["c"]] * 300, "d"],
        {"a": [1.5, None, {}]},
        7,
    ],
)
def test_the_beginning_of_a_value_is_that_of_its_text(value: object) -> None:
    assert beginning(value, 60) == repr(value)[:60]
    assert len(repr(shortened(value, 60))) < 2000
