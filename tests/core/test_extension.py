"""Parts in C are used when they are what the sources beside them make; a build of older ones is told of and left."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from modelserver_backends.llm import kernels

from modelserver.core import accelerator
from modelserver.core.accelerator import load_extension, source_digest


def module(directory: Path, monkeypatch: pytest.MonkeyPatch, **contents: str) -> ModuleType:
    made = ModuleType("_made")
    made.__file__ = str(directory / "_made.abi3.so")
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, "_made", made)
    return made


def test_a_build_of_the_sources_that_lie_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_made.c").write_text("int main;")
    digest = source_digest(tmp_path)
    assert digest is not None
    made = module(tmp_path, monkeypatch, SOURCE_DIGEST=digest)
    assert load_extension("_made", {}) is made


def test_a_build_of_other_sources_is_told_of_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "_made.c").write_text("int main;")
    module(tmp_path, monkeypatch, SOURCE_DIGEST=source_digest(tmp_path) or "")
    (tmp_path / "_made.h").write_text("#define NEW")
    assert load_extension("_made", {}) is None
    assert f"{tmp_path}/_made.abi3.so was built from other sources" in caplog.text
    assert "install again" in caplog.text


def test_a_wheel_has_no_sources_to_compare_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_digest(tmp_path) is None
    made = module(tmp_path, monkeypatch, SOURCE_DIGEST="0123456789abcdef")
    assert load_extension("_made", {}) is made


@pytest.mark.parametrize("environment", [{"MODELSERVER_PURE_PYTHON": "1"}, {"MODELSERVER_PURE_PYTHON": "yes"}])
def test_what_is_not_wanted_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    module(tmp_path, monkeypatch)
    assert load_extension("_made", environment) is None
    assert load_extension("_not_made", {}) is None


@pytest.mark.parametrize("built", [accelerator.load({}), kernels.load({})], ids=["accelerator", "kernels"])
def test_setup_tells_builds_what_they_are_made_of(built: ModuleType | None) -> None:
    if built is not None:  # there was a compiler
        assert source_digest(Path(built.__file__ or "").parent) == built.SOURCE_DIGEST
