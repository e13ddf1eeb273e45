"""Model directories that are broken, or break while the server looks at them.

Others go on; what is mended loads without a restart.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.asking import index, infer, is_ready, wait_for
from support.model_files import write_identity
from support.onnx_models import identity_model
from support.processes import ServerProcess, serving_process


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    """Looks at its models every second."""
    write_identity(root)
    with serving_process(root, "--model-control-mode=poll", "--repository-poll-secs=1") as server:
        server.wait_until_started()
        yield server
        assert "Traceback" not in server.output
        server.signal()
        assert server.wait() == 0


def _half_a_config(directory: Path) -> None:
    config = (directory / "config.pbtxt").read_text()
    (directory / "config.pbtxt").write_text(config[: len(config) // 2])


def _no_bytes(directory: Path) -> None:
    (directory / "config.pbtxt").write_bytes(b"")


def _noise(directory: Path) -> None:
    (directory / "config.pbtxt").write_bytes(bytes(range(256)) * 8)


def _no_version(directory: Path) -> None:
    (directory / "1").rmdir()


def _loop_of_links(directory: Path) -> None:
    (directory / "config.pbtxt").unlink()
    (directory / "config.pbtxt").symlink_to("config.pbtxt")


def _a_million_braces(directory: Path) -> None:
    (directory / "config.pbtxt").write_bytes(b"input { " * 130_000)


BREAKAGES = [_half_a_config, _no_bytes, _noise, _no_version, _loop_of_links, _a_million_braces]


def test_broken_models_are_said_to_be_broken_and_load_when_they_are_mended(root: Path, server: ServerProcess) -> None:
    url, aside = server.http_url, root.parent / f"{root.name}-aside"
    names = [damage.__name__.strip("_") for damage in BREAKAGES]
    for name, damage in zip(names, BREAKAGES, strict=True):
        directory = write_identity(aside, name)
        damage(directory)
        directory.rename(root / name)
    wait_for(lambda: all(index(url).get(name, ("", ""))[0] == "UNAVAILABLE" for name in names), "they are in the index")
    for name in names:
        assert len(index(url)[name][1]) > 20, index(url)[name]
        status, text = infer(url, 1.0, name)
        assert status == 503, text
    assert infer(url, 1.0) == (200, 1.0), "others go on"
    for name in names:
        shutil.rmtree(root / name)
        write_identity(aside, name).rename(root / name)
    for name in names:
        wait_for(lambda: is_ready(url, name), f"{name} loaded")  # noqa: B023 - called at once
        assert infer(url, 2.0, name) == (200, 2.0)
        shutil.rmtree(root / name)


@pytest.mark.slow
def test_a_model_file_that_is_half_written_does_not_replace_the_old_version(root: Path, server: ServerProcess) -> None:
    """The poller waits until a copy is done; one that stops half way fails, and what serves stays."""
    url, aside = server.http_url, root.parent / "onnx"
    directory = identity_model(aside / "onnx", ["n", 2])
    whole = (directory / "1" / "model.onnx").read_bytes()
    directory.rename(root / "onnx")
    wait_for(lambda: is_ready(url, "onnx"), "version 1 serves")
    (root / "onnx" / "2").mkdir()
    (root / "onnx" / "2" / "model.onnx").write_bytes(whole[: len(whole) // 2])
    wait_for(lambda: "2" in server.output.rpartition("loading model 'onnx'")[2], "the half was tried")
    assert is_ready(url, "onnx"), "version 1 still serves"
    (root / "onnx" / "2" / "model.onnx").write_bytes(whole)
    wait_for(lambda: "successfully loaded 'onnx', which serves versions [2]" in server.output, "the whole one serves")
    shutil.rmtree(root / "onnx")
    wait_for(lambda: not is_ready(url, "onnx"), "a model whose directory is gone is unloaded")
    assert infer(url, 3.0) == (200, 3.0)


def test_the_repository_may_vanish_and_come_back(root: Path, server: ServerProcess) -> None:
    """As a network file system does. Loaded models serve on."""
    url = server.http_url
    away = root.with_name("away")
    root.rename(away)
    try:
        wait_for(lambda: "cannot" in server.output or "no such" in server.output.lower(), "it was noticed")
        assert infer(url, 4.0) == (200, 4.0)
    finally:
        away.rename(root)
    wait_for(lambda: infer(url, 5.0) == (200, 5.0), "it is there")
