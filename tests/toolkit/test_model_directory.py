"""A model directory appears whole or not at all, and nothing else is ever removed."""

import zipfile
from pathlib import Path

import pytest

from modelserver.errors import AlreadyExistsError, InvalidArgumentError, ServerError
from modelserver.toolkit.model_directory import model_bytes, new_model_directory


def fill(target: Path, text: str = "x", **options) -> None:
    with new_model_directory(target, **{"force": False, **options}) as made:
        (made / "1").mkdir()
        (made / "1" / "model.onnx").write_text(text)


def test_it_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with new_model_directory(target, force=False) as made:
        assert made.name == "model"
        (made / "config.pbtxt").write_text("")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["config.pbtxt"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    fill(tmp_path / "model", "old")
    with pytest.raises(FileExistsError), new_model_directory(tmp_path / "model", force=True) as made:
        made.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model/1/model.onnx").read_text() == "old"


def test_a_model_is_replaced_only_by_force(tmp_path: Path) -> None:
    fill(tmp_path / "model", "old")
    with pytest.raises(AlreadyExistsError, match="--force"):
        fill(tmp_path / "model", "new")
    fill(tmp_path / "model", "newer", force=True)
    assert (tmp_path / "model/1/model.onnx").read_text() == "newer"
    assert model_bytes(tmp_path / "model") == 5


def test_force_replaces_models_only(tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "letter.txt").write_text("dear")
    link = tmp_path / "link"
    link.symlink_to(precious)
    file = tmp_path / "file"
    file.write_text("")
    for target in (precious, link, file):
        with pytest.raises(InvalidArgumentError, match="--force replaces"):
            fill(target, force=True)
    assert (precious / "letter.txt").read_text() == "dear"
    with pytest.raises(InvalidArgumentError, match="not a directory"):
        fill(file / "model")
    with pytest.raises(InvalidArgumentError, match="the model's name"):
        fill(tmp_path / ".hidden")


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "source")
    for target, source in (
        (tmp_path / "source", tmp_path / "source"),
        (tmp_path / "source", tmp_path / "source/1/model.onnx"),
        (tmp_path / "source/inner", tmp_path / "source"),
        (tmp_path / "other/../source", tmp_path / "source"),
    ):
        with pytest.raises(ServerError, match="overlap"):
            fill(target, force=True, source=source)
    assert (tmp_path / "source/1/model.onnx").exists()
    fill(tmp_path / "sibling", source=tmp_path / "source")


def test_example_inputs_are_not_the_models(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        archive.writestr("m/data/sample_inputs/model.pt", b"x" * 5000)
    empty = (tmp_path / "model.pt2").stat().st_size - 5000
    with zipfile.ZipFile(tmp_path / "model.pt2", "a") as archive:
        archive.writestr("m/data/weights/weight_0", b"y" * 1000)
    assert empty + 1000 < model_bytes(tmp_path) < empty + 1500
    (tmp_path / "labels.pt2").write_bytes(b"z" * 7)  # no archive
    assert model_bytes(tmp_path) > empty + 1007
