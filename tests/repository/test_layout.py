import os
from pathlib import Path
from typing import Any

import pytest
from support.repositories import write_model

from modelserver.backend.model_files import backend_for_model_files
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from modelserver.repository.layout import INCOMPLETE_MARKER, fingerprint_model, scan_model
from modelserver.repository.roots import RepositoryRoot, RepositoryScan, find_model, resolve_roots, scan_roots


def scan(*paths: Path, config_name: str = "", model_name: str = "") -> RepositoryScan:
    roots = resolve_roots(paths, model_name=model_name, find_backend=backend_for_model_files)
    return scan_roots(roots, config_name=config_name, find_backend=backend_for_model_files)


def resolve(path: Path, model_name: str = "") -> RepositoryRoot:
    return resolve_roots([path], model_name=model_name, find_backend=backend_for_model_files)[0]


def find(name: str, *paths: Path) -> Path:
    roots = [resolve(path) for path in paths]
    return find_model(roots, name, config_name="", find_backend=backend_for_model_files).directory


def forbid(monkeypatch: pytest.MonkeyPatch, *forbidden: Path) -> None:
    """Let no directory of `forbidden` be listed: root, who may run the tests, is denied nothing."""
    scandir = os.scandir

    def scandir_if_allowed(path: Any) -> Any:
        if Path(path) in forbidden:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_if_allowed)


def test_finds_models_configs_and_versions(tmp_path: Path) -> None:
    write_model(tmp_path, "a", versions=(1, 3, 20))
    write_model(tmp_path, "b", config=None)
    found = scan(tmp_path)
    assert found.names == ("a", "b")
    assert list(found.models["a"].versions) == [1, 3, 20]
    assert found.models["a"].config_file == tmp_path / "a" / "config.pbtxt"
    assert found.models["b"].config_file is None
    assert found.ignored == ()


@pytest.mark.parametrize("entry", ["01", "1a", "v1", "-1", "1.0", "data", "²", "99999999999999999999"])
def test_only_plain_numbers_are_versions(tmp_path: Path, entry: str) -> None:
    directory = write_model(tmp_path, "a", versions=(7,))
    (directory / entry).mkdir()
    assert list(scan(tmp_path).models["a"].versions) == [7]


def test_a_version_with_leading_zeros_is_reported(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "a")
    (directory / "007").mkdir()
    (ignored,) = scan(tmp_path).ignored
    assert ignored.path == directory / "007"
    told = "ignore version directory '007' which contains leading zeros in its directory name: name it '7'"
    assert ignored.reason == told


def test_a_file_named_like_a_version_is_none(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "a")
    (directory / "2").write_text("")
    assert list(scan(tmp_path).models["a"].versions) == [1]


def test_stray_files_hidden_and_foreign_directories_are_no_models(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, ".hidden")
    write_model(tmp_path, "bad name")
    (tmp_path / "README.md").write_text("")
    (tmp_path / "docs").mkdir()
    found = scan(tmp_path)
    assert found.names == ("a",)
    reasons = {ignored.path.name: ignored.reason for ignored in found.ignored}
    assert reasons.keys() == {"bad name", "docs"}
    assert "neither config.pbtxt nor a version" in reasons["docs"]


def test_the_same_model_in_two_roots_is_a_duplicate(tmp_path: Path) -> None:
    for root in ("one", "two"):
        write_model(tmp_path / root, "both")
        write_model(tmp_path / root, f"only_{root}")
    found = scan(tmp_path / "one", tmp_path / "two")
    assert set(found.models) == {"only_one", "only_two"}
    assert found.duplicates == {"both": (tmp_path / "one" / "both", tmp_path / "two" / "both")}
    with pytest.raises(AlreadyExistsError, match="model appears in two or more repositories"):
        find("both", tmp_path / "one", tmp_path / "two")


def test_a_config_is_chosen_by_name_and_falls_back(tmp_path: Path) -> None:
    for name in ("with", "without"):
        write_model(tmp_path, name)
    (tmp_path / "with" / "configs").mkdir()
    (tmp_path / "with" / "configs" / "large.pbtxt").write_text("")
    found = scan(tmp_path, config_name="large")
    assert found.models["with"].config_file == tmp_path / "with" / "configs" / "large.pbtxt"
    assert found.models["without"].config_file == tmp_path / "without" / "config.pbtxt"


def test_a_marker_holds_a_model_back(tmp_path: Path) -> None:
    directory = tmp_path / "a"
    directory.mkdir()
    (directory / INCOMPLETE_MARKER).touch()
    assert scan(tmp_path).models["a"].is_incomplete


def test_symlinked_roots_models_and_versions(tmp_path: Path) -> None:
    real = write_model(tmp_path / "real", "a")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b").symlink_to(real)
    (tmp_path / "root").symlink_to(tmp_path / "more")
    (real / "2").symlink_to(real / "1")
    found = scan(tmp_path / "root")
    assert list(found.models["b"].versions) == [1, 2]
    assert find("b", tmp_path / "root") == tmp_path / "root" / "b"


def test_a_directory_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "closed", config=None)
    (tmp_path / "lost+found").mkdir()
    forbid(monkeypatch, tmp_path / "closed", tmp_path / "lost+found")
    found = scan(tmp_path)
    assert found.names == ("good",)
    assert [ignored.path.name for ignored in found.ignored] == ["closed", "lost+found"]
    assert all(ignored.reason == "it cannot be read: Permission denied" for ignored in found.ignored)
    assert found.unreadable == ("closed", "lost+found")


def test_links_in_circles_hide_no_other(tmp_path: Path) -> None:
    model = write_model(tmp_path, "good")
    for place in (tmp_path / "circle", model / "2"):
        place.symlink_to(place)
    assert list(scan(tmp_path).models["good"].versions) == [1]
    assert scan(tmp_path).names == ("good",)


def test_a_root_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, tmp_path)
    with pytest.raises(InvalidArgumentError, match=f"'{tmp_path}' cannot be read: Permission denied"):
        resolve(tmp_path)


def test_scanning_writes_nothing(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, directory, directory / "1")}
    fingerprint_model(scan(tmp_path).models["a"])
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("has_config", [True, False])
def test_a_root_with_a_version_directory_is_one_model(tmp_path: Path, has_config: bool) -> None:
    directory = write_model(tmp_path, "mnist", **({} if has_config else {"config": None}))
    (directory / "warmup").mkdir()
    assert resolve(directory) == RepositoryRoot(directory, "mnist")
    found = scan(directory, model_name="served")
    assert found.names == ("served",)
    assert found.models["served"].is_single
    assert list(found.models["served"].versions) == [1]
    assert list(fingerprint_model(found.models["served"]).versions) == [1]


@pytest.mark.parametrize("has_config", [True, False])
def test_a_root_with_a_lone_model_file_is_version_1_of_one_model(tmp_path: Path, has_config: bool) -> None:
    (tmp_path / "model.onnx").write_text("")
    if has_config:
        (tmp_path / "config.pbtxt").write_text("")
    layout = scan(tmp_path, model_name="m").models["m"]
    assert layout.versions == {1: tmp_path}
    fingerprint = fingerprint_model(layout)
    assert fingerprint.shared.files == ()
    assert "model.onnx" in [file.path for file in fingerprint.versions[1].files]


def test_a_file_is_version_1_of_one_model_without_what_lies_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "mnist-8.onnx"
    file.write_text("")
    layout = scan(file).models["mnist-8"]
    assert layout.versions == {1: tmp_path}
    fingerprint = fingerprint_model(layout)
    (tmp_path / "config.pbtxt").write_text("")
    write_model(tmp_path, "other")
    assert scan(file).names == ("mnist-8",)
    assert fingerprint_model(layout) == fingerprint
    file.write_text("more")
    assert fingerprint_model(layout) != fingerprint
    file.unlink()
    assert (
        not scan_roots(
            [RepositoryRoot(tmp_path, "mnist-8", file.name)], config_name="", find_backend=backend_for_model_files
        )
        .models["mnist-8"]
        .versions
    )


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("model.safetensors", "the directory of the checkpoint"),
        ("notes.txt", "not a model of LightGBM"),
        ("model.keras", "TensorFlow.*ONNX"),
        ("config.pbtxt", "the directory of the model"),
        ("notes.md", r"expected a model's file \(.*\.gguf, .*\.onnx, "),
    ],
)
def test_a_file_that_no_backend_serves_is_refused_with_a_way_out(tmp_path: Path, name: str, way: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(InvalidArgumentError, match=rf"{name}' cannot be served: .*{way}"):
        resolve(tmp_path / name)


def test_a_root_with_models_is_a_repository_whatever_else_lies_in_it(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    (tmp_path / "config.pbtxt").write_text("")
    (tmp_path / "model.onnx").write_text("")
    assert resolve(tmp_path).model_name is None


@pytest.mark.parametrize("name", ["x y", "../x", "-x"])
def test_the_name_given_to_a_single_model_must_be_one(tmp_path: Path, name: str) -> None:
    directory = write_model(tmp_path, "mnist")
    with pytest.raises(InvalidArgumentError, match="invalid model name"):
        resolve(directory, name)


def test_a_single_model_in_a_directory_that_is_no_name_asks_for_one(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "my model")
    with pytest.raises(InvalidArgumentError, match=r"'my model'.*--model-name"):
        resolve(directory)
    assert resolve(directory, "mine").model_name == "mine"


def test_a_name_for_a_directory_of_many_models_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    with pytest.raises(InvalidArgumentError, match="--model-name"):
        resolve(tmp_path, "mine")


def test_models_may_have_numbers_for_names(tmp_path: Path) -> None:
    write_model(tmp_path, "1")
    assert resolve(tmp_path).model_name is None
    assert scan(tmp_path).names == ("1",)


def test_an_empty_root_is_a_repository(tmp_path: Path) -> None:
    assert resolve(tmp_path) == RepositoryRoot(tmp_path)
    assert scan(tmp_path).names == ()


def test_a_root_must_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing at that path"):
        resolve(tmp_path / "missing")


def test_an_unknown_model_is_answered_with_places_and_near_names(tmp_path: Path) -> None:
    write_model(tmp_path, "resnet50")
    with pytest.raises(NotFoundError) as caught:
        find("resnet", tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "did you mean 'resnet50'?" in caught.value.message


def test_the_fingerprint_tells_versions_from_what_they_share(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "a", versions=(1, 2))
    before = fingerprint_model(scan_model(directory, "a"))
    (directory / "2" / "weights").write_text("other weights")
    after = fingerprint_model(scan_model(directory, "a"))
    assert after.shared == before.shared
    assert after.versions[1] == before.versions[1]
    assert after.versions[2] != before.versions[2]
