from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.batching import batching_config

from modelserver.backend import BackendContext
from modelserver.execution.response_cache import make_generation


@pytest.fixture
def context(tmp_path: Path) -> BackendContext:
    version = tmp_path / "m" / "1"
    (version / "deep").mkdir(parents=True)
    for name in ("1/model.bin", "1/deep/more.bin", "labels.txt"):
        (tmp_path / "m" / name).write_text("content")
    return BackendContext("m", 1, batching_config(), tmp_path / "m", version)


def test_each_load_of_an_own_cache_is_another(context: BackendContext) -> None:
    assert make_generation(context, is_shared=False) != make_generation(context, is_shared=False)


def test_in_a_shared_cache_the_same_files_are_the_same_model(context: BackendContext) -> None:
    assert make_generation(context, is_shared=True) == make_generation(context, is_shared=True)


@pytest.mark.parametrize("name", ["1/model.bin", "1/deep/more.bin", "labels.txt"])
def test_another_file_is_another_model(context: BackendContext, name: str) -> None:
    before = make_generation(context, is_shared=True)
    path = context.model_directory / name
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert make_generation(context, is_shared=True) != before


def test_another_config_version_or_name_is_another_model(context: BackendContext) -> None:
    others = [
        context,
        replace(context, config=replace(context.config, max_batch_size=99)),
        replace(context, version=2),
        replace(context, model_name="n"),
        replace(context, namespace="/other"),
    ]
    assert len({make_generation(other, is_shared=True) for other in others}) == len(others)


def test_what_python_compiles_beside_a_model_is_no_change_of_it(context: BackendContext) -> None:
    before = make_generation(context, is_shared=True)
    cache = context.version_directory / "__pycache__"
    cache.mkdir()
    (cache / "model.cpython-311.pyc").write_text("compiled")
    assert make_generation(context, is_shared=True) == before
