import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cloud import listing_of

from modelserver.errors import InternalError, InvalidArgumentError, UnavailableError
from modelserver.repository.cloud_cache import CloudCache, CloudTree
from modelserver.store.cloud_store import RemoteFile


class Source:
    """Writes files whose tags are their contents, and remembers which were asked for."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, path: str, file: RemoteFile, target: Path) -> None:
        self.fetched.append(path)
        if path in self.failing:
            raise UnavailableError(f"no {path}")
        target.write_text(file.tag)


@pytest.fixture
def source() -> Source:
    return Source()


def make(cache: CloudCache, source: Source, model: str = "m", **files: str) -> CloudTree:
    contents = {path.replace("__", "/"): content.encode() for path, content in files.items()}
    return cache.materialise("s3://bucket", model, listing_of(contents, "1", "empty"), source)


def contents(tree: CloudTree) -> dict[str, str]:
    return {str(path.relative_to(tree.path)): path.read_text() for path in tree.path.rglob("*") if path.is_file()}


def blobs(directory: Path) -> list[str]:
    return sorted(path.read_text() for path in (directory / "blobs").iterdir())


def test_a_tree_is_what_was_listed_directories_included(tmp_path: Path, source: Source) -> None:
    tree = make(CloudCache(tmp_path), source, config="c", **{"1__weights": "w"})
    assert contents(tree) == {"config": "c", "1/weights": "w"}
    assert (tree.path / "empty").is_dir()


def test_only_what_changed_is_fetched(tmp_path: Path, source: Source) -> None:
    cache = CloudCache(tmp_path)
    first = make(cache, source, config="c", **{"1__weights": "w"})
    second = make(cache, source, config="changed", **{"1__weights": "w"})
    assert sorted(source.fetched) == ["1/weights", "config", "config"]
    assert (contents(first)["config"], contents(second)["config"]) == ("c", "changed")
    assert (first.path / "1/weights").stat().st_ino == (second.path / "1/weights").stat().st_ino
    assert make(CloudCache(tmp_path), source, config="c", **{"1__weights": "w"}).path == first.path
    assert len(source.fetched) == 3, "another server's cache of the same directory has it all"


def test_what_was_fetched_before_a_failure_stays(tmp_path: Path, source: Source) -> None:
    cache = CloudCache(tmp_path)
    source.failing = {"b"}
    with pytest.raises(UnavailableError, match="no b"):
        make(cache, source, a="1", b="2", c="3")
    assert not list(tmp_path.glob("trees/*/*/*"))
    assert all(not path.name.startswith(".") for path in (tmp_path / "blobs").iterdir())
    fetched_before = set(source.fetched) - {"b"}
    source.failing, source.fetched = set(), []
    make(cache, source, a="1", b="2", c="3")
    assert "b" in source.fetched
    assert not fetched_before & set(source.fetched)


def test_a_disk_that_fails_is_told(tmp_path: Path, source: Source) -> None:
    cache = CloudCache(tmp_path)
    (tmp_path / "trees").rmdir()
    (tmp_path / "trees").write_text("")
    with pytest.raises(InternalError, match="cannot be copied to"):
        make(cache, source, a="1")
    with pytest.raises(InvalidArgumentError, match="--cloud-cache-directory"):
        CloudCache(tmp_path)


def test_what_is_not_used_for_longest_goes_first(tmp_path: Path, source: Source) -> None:
    cache = CloudCache(tmp_path, max_bytes=20)
    for age_s, name in ((30, "a"), (20, "b"), (10, "c")):
        tree = make(cache, source, name, file=name * 8)
        past_s = time.time() - age_s
        os.utime(tree.path, (past_s, past_s))
        tree.release()
        if name == "b":
            make(cache, source, "a", file="a" * 8).release()  # used again
    assert blobs(tmp_path) == ["a" * 8, "c" * 8]


def test_what_is_held_stays_and_what_is_shared_too(
    tmp_path: Path, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CloudCache(tmp_path, max_bytes=10)
    held = make(cache, source, same="s" * 8, config="1")
    newer = make(cache, source, same="s" * 8, config="2")
    newer.release()
    make(cache, source, "other", file="o" * 8)
    assert "models in use take" in caplog.text
    assert contents(held) == {"same": "s" * 8, "config": "1"}
    assert not newer.path.exists()
    held.release()
    make(cache, source, "third", file="t" * 2)
    assert blobs(tmp_path) == ["o" * 8, "t" * 2]


def test_without_a_bound_everything_stays(tmp_path: Path, source: Source) -> None:
    cache = CloudCache(tmp_path)
    for name in "abc":
        make(cache, source, name, file=name * 8).release()
    assert len(blobs(tmp_path)) == 3


def test_files_are_fetched_side_by_side(tmp_path: Path) -> None:
    barrier = threading.Barrier(4, timeout=10)

    def fetch(path: str, file: RemoteFile, target: Path) -> None:
        barrier.wait()
        target.write_text(file.tag)

    listing = listing_of({str(number): b"x" for number in range(4)})
    assert len(contents(CloudCache(tmp_path).materialise("s3://b", "m", listing, fetch))) == 4


def test_the_same_tree_made_at_once_is_one(tmp_path: Path, source: Source) -> None:
    cache = CloudCache(tmp_path, max_bytes=1)
    with ThreadPoolExecutor(8) as pool:
        trees = list(pool.map(lambda _: make(cache, source, a="aaaa", b="bb"), range(16)))
    assert len({tree.path for tree in trees}) == 1
    assert contents(trees[0]) == {"a": "aaaa", "b": "bb"}
    assert len(list(trees[0].path.parent.iterdir())) == 1


def test_what_a_killed_server_left_is_removed_when_it_is_old(tmp_path: Path, source: Source) -> None:
    tree = make(CloudCache(tmp_path), source, a="1")
    for left in (tmp_path / "blobs" / ".old", tree.path.parent / ".old"):
        left.mkdir()
        os.utime(left, (1, 1))
    (tmp_path / "blobs" / ".young").write_text("")
    CloudCache(tmp_path)
    assert not list(tmp_path.rglob(".old"))
    assert (tmp_path / "blobs" / ".young").exists()
