from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cloud import CountingStore, MemoryBucket, memory_bucket

from modelserver.repository.cloud_cache import CloudCache
from modelserver.repository.cloud_root import CloudRoot, fingerprint_listing, versions_of


@pytest.fixture
def bucket() -> Iterator[MemoryBucket]:
    with memory_bucket("root") as bucket:
        yield bucket


@pytest.fixture
def root(bucket: MemoryBucket, tmp_path: Path) -> CloudRoot:
    return CloudRoot(CountingStore(bucket), CloudCache(tmp_path / "cache"))


def test_models_are_told_from_other_files(bucket: MemoryBucket, root: CloudRoot) -> None:
    bucket.write_model("m", versions=(1, 12))
    bucket.make_directory("ensemble/1")
    bucket.write("half/.incomplete", "")
    for path in ("README.md", "notes/a.txt", ".git/config.pbtxt", "m/.hidden/x", "m/__pycache__/x", "bad name/1/x"):
        bucket.write(path, "x")
    root.refresh()
    assert list(root.models) == ["ensemble", "half", "m"]
    assert versions_of(root.models["m"]) == (1, 12)
    assert versions_of(root.models["ensemble"]) == (1,)
    assert sorted(root.models["m"].files) == ["1/weights", "12/weights", "config.pbtxt"]


def test_the_generation_follows_changes(bucket: MemoryBucket, root: CloudRoot) -> None:
    bucket.write_model("m")
    root.refresh()
    before = root.generation
    root.refresh()
    assert root.generation == before
    bucket.write("m/1/weights", "other")
    root.refresh()
    assert root.generation == before + 1


def test_one_model_is_listed_without_the_others(bucket: MemoryBucket, root: CloudRoot) -> None:
    bucket.write_model("m")
    assert root.refresh_model("m") is not None
    assert list(root.models) == ["m"]
    bucket.write_model("n")
    assert root.refresh_model("m") is not None
    assert list(root.models) == ["m"]
    bucket.remove("m")
    assert root.refresh_model("m") is None
    assert list(root.models) == []


def test_a_fingerprint_follows_contents(bucket: MemoryBucket, root: CloudRoot) -> None:
    bucket.write_model("m")
    first = fingerprint_listing(root.refresh_model("m"))
    assert fingerprint_listing(root.refresh_model("m")) == first
    bucket.write("m/1/weights", "weights of X")
    assert fingerprint_listing(root.refresh_model("m")) != first


def test_a_copy_is_what_was_listed(bucket: MemoryBucket, root: CloudRoot) -> None:
    bucket.write_model("m")
    bucket.make_directory("m/2")
    tree = root.materialise("m", root.refresh_model("m"))
    assert (tree.path / "1" / "weights").read_text() == "weights of 1"
    assert (tree.path / "2").is_dir()


@pytest.mark.parametrize("path", ["m/../../evil", "m/1/../../../evil", "m/./evil", "../evil"])
def test_paths_that_would_leave_the_copy_are_no_files_of_a_model(
    bucket: MemoryBucket, root: CloudRoot, path: str, tmp_path: Path
) -> None:
    bucket.write_model("m")
    bucket.write(path, "evil")
    root.refresh()
    tree = root.materialise("m", root.models["m"])
    copies = [found.name for found in tmp_path.rglob("*") if found.name == "evil"]
    assert copies == []
    assert sorted(found.name for found in tree.path.iterdir()) == ["1", "config.pbtxt"]
