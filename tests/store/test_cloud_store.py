from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cloud import CountingStore, MemoryBucket, memory_bucket

from modelserver.store import cloud_store
from modelserver.store.cloud_store import CloudStore, CloudUnavailableError
from modelserver.store.cloud_uri import parse_cloud_uri


@pytest.fixture
def bucket() -> Iterator[MemoryBucket]:
    with memory_bucket("store") as bucket:
        yield bucket


def test_a_listing_has_files_and_directories(bucket: MemoryBucket) -> None:
    bucket.write_model("m")
    bucket.make_directory("n/1")
    store = CloudStore(bucket.uri, {})
    listing = store.list()
    assert {path: file.size_bytes for path, file in listing.files.items() if "weights" in path} == {"m/1/weights": 12}
    assert {"m", "m/1", "n", "n/1"} <= listing.directories
    assert set(store.list("m").files) == {"config.pbtxt", "1/weights"}
    assert store.list("missing").files == {}


def test_listings_are_not_remembered(bucket: MemoryBucket) -> None:
    store = CloudStore(bucket.uri, {})
    bucket.write("m/a", "1")
    before = store.list().files["m/a"]
    bucket.write("m/a", "2")
    assert store.list().files["m/a"].tag != before.tag


def test_a_file_is_fetched_if_it_is_the_one_that_was_listed(bucket: MemoryBucket, tmp_path: Path) -> None:
    store = CloudStore(bucket.uri, {})
    bucket.write("m/a", "old")
    file = store.list().files["m/a"]
    store.fetch("m/a", file, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "old"
    bucket.write("m/a", "new")
    with pytest.raises(CloudUnavailableError, match="'memory://store/models/m/a' changed while it was fetched"):
        store.fetch("m/a", file, tmp_path / "copy")
    bucket.remove("m/a")
    with pytest.raises(CloudUnavailableError, match="cannot be read: 'm/a': FileNotFoundError"):
        store.fetch("m/a", file, tmp_path / "copy")


def test_a_repository_that_is_not_there(bucket: MemoryBucket) -> None:
    store = CloudStore(parse_cloud_uri("memory://nowhere/models"), {})
    assert store.list().files == {}


def test_a_library_that_is_not_installed(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cloud_store._LIBRARIES, "memory", "no_such_library")
    with pytest.raises(
        CloudUnavailableError, match=r"'memory://store/models' needs the Python package 'no_such_library'"
    ):
        CountingStore(bucket)
