"""Modelfiles: the grammar as Ollama reads it, errors with their line, and the writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelserver.config.modelfile import Modelfile, is_modelfile, name_of_modelfile, parse_modelfile, read_modelfile
from modelserver.config.ollama_options import sampling_of
from modelserver.errors import InvalidArgumentError

WHOLE = '''\
# A model
FROM ./model.gguf
parameter temperature 0.5
PARAMETER stop "<|end|>"
PARAMETER stop "  two words "
PARAMETER num_ctx 4096
PARAMETER use_mmap true
TEMPLATE """{{ if .System }}{{ .System }}
{{ end }}# {{ .Prompt }} "quoted"
"""
SYSTEM You are "brief".
  # indented comment
MESSAGE user Hello: there
Message assistant """Hi
there"""
LICENSE """
one"""
LICENSE two
RENDERER qwen3
PARSER qwen3
REQUIRES v0.14.0
'''


def test_every_instruction() -> None:
    assert parse_modelfile(WHOLE) == Modelfile(
        sources=("./model.gguf",),
        parameters={"temperature": 0.5, "stop": ["<|end|>", "  two words "], "num_ctx": 4096, "use_mmap": True},
        template='{{ if .System }}{{ .System }}\n{{ end }}# {{ .Prompt }} "quoted"\n',
        system='You are "brief".',
        messages=({"role": "user", "content": "Hello: there"}, {"role": "assistant", "content": "Hi\nthere"}),
        licenses=("\none", "two"),
        renderer="qwen3",
        parser="qwen3",
        requires="0.14.0",
    )


def test_what_is_written_is_read_again() -> None:
    modelfile = parse_modelfile(WHOLE)
    assert parse_modelfile(modelfile.text()) == modelfile
    assert "PARAMETER use_mmap true\n" in modelfile.text()


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("FROM a\nSYSTEM one", "one"),
        ("FROM a\r\nSYSTEM   one  \r\n", "one"),
        ("\n\n  from a\n\tsystem\tone", "one"),
        ('FROM a\nSYSTEM "a\nb"\n', "a\nb"),
        ('FROM a\nSYSTEM """a "b" c"""', 'a "b" c'),
        ('FROM a\nSYSTEM "one" two"\n', 'one" two'),
        ("FROM a\nSYSTEM one\nSYSTEM two # not a comment", "two # not a comment"),
        ('FROM a\nSYSTEM """"""', ""),
        ("\ufeffFROM a\nSYSTEM one", "one"),
    ],
)
def test_values(text: str, system: str) -> None:
    assert parse_modelfile(text.encode()).system == system


def test_text_of_windows_in_utf_16() -> None:
    assert parse_modelfile("FROM a\nSYSTEM é".encode("utf-16")).system == "é"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM line"),
        ("SYSTEM x", "no FROM line"),
        ("FROM a\nFORM b", '(line 2): command must be one of "from", "license"'),
        ("FROM", "(line 1): command must be one of"),
        ("FROM a\n\n1 b", "(line 3): command must be one of"),
        ('FROM a\n# c\nSYSTEM "x\n', "(line 3): unexpected EOF: its quotes are never closed"),
        ('FROM a\nSYSTEM """"', "unexpected EOF"),
        ("FROM a\nMESSAGE tool x", '(line 2): message role must be one of "system", "user", or "assistant"'),
        ("FROM a\nPARAMETER stop\n", "(line 2): expected the name of a parameter, and a value after it"),
        ("FROM a\nPARAMETER temprature 1", "(line 2): unknown parameter 'temprature'; did you mean temperature?"),
        ("FROM a\nPARAMETER top_k many", "(line 2): invalid integer value 'many' of parameter 'top_k'"),
        ("FROM a\nPARAMETER use_mmap maybe", "invalid boolean value 'maybe'"),
        ("FROM a\nPARAMETER tfs_z 0.5", "this server has no such sampler"),
        ("FROM a\nREQUIRES new", "(line 2): requires must be a valid semver"),
    ],
)
def test_errors_tell_the_line(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_modelfile(text, "Modelfile")
    assert caught.value.message.startswith("Modelfile")
    assert message in caught.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_modelfile(tmp_path / "Modelfile")
    (tmp_path / "Modelfile").write_bytes(b"FROM \xff\xfe")
    with pytest.raises(InvalidArgumentError, match="is not text"):
        read_modelfile(tmp_path / "Modelfile")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/tiny/Modelfile", "tiny"),
        ("/models/tiny/Modelfile.small", "small"),
        ("/models/tiny/large.modelfile", "large"),
        ("/models/tiny/model.gguf", None),
    ],
)
def test_names(path: str, name: str | None) -> None:
    assert is_modelfile(Path(path)) == (name is not None)
    assert name is None or name_of_modelfile(Path(path)) == name


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"num_predict": -1, "seed": -1, "top_k": 0, "typical_p": 1}, {"max_tokens": None, "top_k": -1}),
        ({"num_predict": 5, "repeat_penalty": 1.1, "num_ctx": 9}, {"max_tokens": 5, "repetition_penalty": 1.1}),
        ({"mirostat": 0, "mirostat_tau": 1.0, "stop": []}, {}),
    ],
)
def test_parameters_of_sampling(options: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert sampling_of(options) == sampling
