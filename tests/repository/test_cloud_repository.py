"""A model repository in an object store, from end to end but for the wire."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cloud import CountingStore, MemoryBucket, memory_bucket
from support.repositories import GatedLoader, infer, open_repository, write_model

from modelserver.errors import AlreadyExistsError, NotFoundError, UnavailableError
from modelserver.repository import roots
from modelserver.repository.options import ControlMode
from modelserver.repository.repository import ModelRepository
from modelserver.store.cloud_store import CloudUnavailableError

ALL = "version_policy { all { } }"


class Cloud:
    """A bucket, the store through which the repository sees it, and a directory for copies."""

    def __init__(self, bucket: MemoryBucket, store: CountingStore, cache: Path) -> None:
        self.bucket = bucket
        self.store = store
        self.cache = cache

    def open(self, *others: Path, **options: Any) -> AbstractAsyncContextManager[ModelRepository]:
        return open_repository(self.bucket.uri, *others, cloud_cache_directory=self.cache, **options)

    def fetched(self) -> list[str]:
        """What was fetched since the last call."""
        fetched, self.store.fetched = self.store.fetched, []
        return sorted(fetched)

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[ModelRepository]:
        async with self.open(control_mode=ControlMode.POLL) as repository:
            yield repository


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with memory_bucket("repository") as bucket:
        store = CountingStore(bucket)
        monkeypatch.setattr(roots, "CloudStore", lambda *_: store)
        yield Cloud(bucket, store, tmp_path / "cache")


async def poll(repository: ModelRepository) -> None:
    """Two looks, after which what has changed is acted on."""
    for _ in range(2):
        await repository._poller.poll_once()
        await repository._poller.wait_idle()


def rows(repository: ModelRepository) -> list[tuple[str, int | None, str]]:
    return [(row.name, row.version, row.state.value) for row in repository.index()]


async def test_all_models_are_loaded(cloud: Cloud) -> None:
    cloud.bucket.write_model("a", versions=(1, 2), extra=ALL)
    cloud.bucket.write_model("b")
    async with cloud.open(control_mode=ControlMode.NONE) as repository:
        assert rows(repository) == [("a", 1, "READY"), ("a", 2, "READY"), ("b", 1, "READY")]
        await infer(repository, "b", 7)
        directory = repository._lifecycles["b"].loaded[1].definition.versions[1]
        assert (directory / "weights").read_text() == "weights of 1"
        assert len(cloud.fetched()) == 5
    async with cloud.open(control_mode=ControlMode.NONE) as repository:
        await infer(repository, "b", 7)
    assert cloud.fetched() == [], "everything is here from the first life"


async def test_mode_explicit_fetches_what_is_loaded(cloud: Cloud) -> None:
    cloud.bucket.write_model("a")
    cloud.bucket.write_model("b")
    async with cloud.open(load_models=("a",)) as repository:
        assert rows(repository) == [("a", 1, "READY"), ("b", None, "UNKNOWN")]
        assert cloud.fetched() == ["a/1/weights", "a/config.pbtxt"]
        await repository.load("b")
        assert cloud.fetched() == ["b/1/weights", "b/config.pbtxt"]
        with pytest.raises(
            NotFoundError, match=r"'c': model not found in any model repository .*looked in: memory://repository/models"
        ):
            await repository.load("c")
        with pytest.raises(NotFoundError, match="has no version 7"):
            await repository.load("a", version=7)


async def test_a_reload_fetches_and_loads_what_has_changed(cloud: Cloud) -> None:
    cloud.bucket.write_model("m", versions=(1, 2), extra=ALL)
    async with cloud.open(load_models=("m",)) as repository:
        first, second = repository.get("m", 1), repository.get("m", 2)
        cloud.fetched()
        await repository.load("m")
        assert (repository.get("m", 1), repository.get("m", 2)) == (first, second)
        cloud.bucket.write("m/2/weights", "other weights")
        await repository.load("m")
        assert cloud.fetched() == ["m/2/weights"]
        assert repository.get("m", 1) is first
        assert repository.get("m", 2) is not second
        directory = repository._lifecycles["m"].loaded[2].definition.versions[2]
        assert (directory / "weights").read_text() == "other weights"


async def test_what_serves_keeps_its_copy_whatever_the_bound(cloud: Cloud) -> None:
    cloud.bucket.write_model("m", versions=(1, 2), extra=ALL)
    async with cloud.open(load_models=("m",), cloud_cache_bytes=1) as repository:
        old = repository._lifecycles["m"].loaded[1].held[0].path
        for number in range(3):
            cloud.bucket.write("m/2/weights", f"weights {number}")
            await repository.load("m")
            await repository._lifecycles["m"].wait_idle()
        assert (old / "1" / "weights").read_text() == "weights of 1"
        trees = list(cloud.cache.glob("trees/*/m/*"))
        assert len(trees) <= 3, "of version 1, the newest, and perhaps one that was in use when it was made"


async def test_versions_and_overrides(cloud: Cloud, tmp_path: Path) -> None:
    cloud.bucket.write_model("m", versions=(1, 2))
    config = (
        '{"backend": "identity", "max_batch_size": 2, '
        '"input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}], '
        '"output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}]}'
    )
    options: dict[str, Any] = {"load_models": ("m",), "override_directory": tmp_path / "kept"}
    async with cloud.open(**options) as repository:
        await repository.load("m", version=1)
        assert repository.ready_versions("m") == (1, 2)
        await repository.load("m", config_json=config, persists=True)
        assert "max_batch_size: 8 -> 2" in repository.index()[-1].reason
    async with cloud.open(**options) as repository:
        assert repository.get("m", None).config.max_batch_size == 2


async def test_polling_follows_the_listing(cloud: Cloud) -> None:
    cloud.bucket.write_model("m")
    async with cloud.polling() as repository:
        model = repository.get("m", None)
        cloud.fetched()
        await poll(repository)
        assert repository.get("m", None) is model
        cloud.bucket.write_model("m", versions=(2,))
        cloud.bucket.write_model("new")
        await poll(repository)
        assert rows(repository)[-2:] == [("m", 2, "READY"), ("new", 1, "READY")]
        assert cloud.fetched() == ["m/2/weights", "m/config.pbtxt", "new/1/weights", "new/config.pbtxt"]
        cloud.bucket.remove("new")
        await poll(repository)
        with pytest.raises(UnavailableError):
            repository.get("new", None)


async def test_a_model_that_is_marked_as_incomplete_waits(cloud: Cloud) -> None:
    cloud.bucket.write_model("m")
    async with cloud.polling() as repository:
        cloud.bucket.write("m/.incomplete", "")
        cloud.bucket.write_model("m", versions=(2,))
        await poll(repository)
        assert repository.ready_versions("m") == (1,)
        cloud.bucket.remove("m/.incomplete")
        await poll(repository)
        assert repository.ready_versions("m") == (2,)


async def test_what_cannot_be_fetched_leaves_the_old_version(cloud: Cloud) -> None:
    cloud.bucket.write_model("m")
    async with cloud.open(load_models=("m",)) as repository:
        model = repository.get("m", None)
        cloud.bucket.write("m/1/weights", "other")
        cloud.store.failures["m/1/weights"] = CloudUnavailableError("no route to host")
        with pytest.raises(UnavailableError, match="no route to host"):
            await repository.load("m")
        assert repository.get("m", None) is model
        assert "no route to host" in repository.index()[0].reason
        cloud.store.failures.clear()
        await repository.load("m")
        assert repository.get("m", None) is not model


async def test_a_store_that_cannot_be_listed(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.bucket.write_model("m")

    def fail(_directory: str = "") -> None:
        raise CloudUnavailableError("access denied")

    async with cloud.polling() as repository:
        monkeypatch.setattr(cloud.store, "list", fail)
        await poll(repository)
        await infer(repository, "m")
        assert "the model repository cannot be read, nothing is changed: access denied" in caplog.text
    with pytest.raises(UnavailableError, match="the model repository cannot be read: access denied"):
        async with cloud.polling():
            pass


async def test_beside_other_repositories(cloud: Cloud, tmp_path: Path) -> None:
    cloud.bucket.write_model("both")
    cloud.bucket.write_model("far")
    for name in ("both", "near"):
        write_model(tmp_path / "local", name)
    async with cloud.open(tmp_path / "local", load_models=("far", "near")) as repository:
        assert repository.ready_versions("far") == repository.ready_versions("near") == (1,)
        with pytest.raises(AlreadyExistsError, match="two or more repositories"):
            await repository.load("both")
    async with cloud.open(tmp_path / "local", load_models=("*",), has_namespaces=True) as repository:
        assert repository.get("models::both", None).namespace == "memory://repository/models"
        assert repository.get("local::both", None).namespace == str(tmp_path / "local")


async def test_the_index_finds_new_models_after_a_while(cloud: Cloud) -> None:
    cloud.bucket.write_model("m")
    async with cloud.open(poll_interval_s=0.0) as repository:
        cloud.bucket.write_model("new")
        repository.index()
        await asyncio.wrap_future(repository._catalog.listing)
        assert ("new", None, "UNKNOWN") in rows(repository)


async def test_reloads_from_a_store_lose_no_request(cloud: Cloud) -> None:
    cloud.bucket.write_model("m")
    loader = GatedLoader()
    async with cloud.open(load_models=("m",), loader=loader, cloud_cache_bytes=100) as repository:
        is_over = False

        async def ask() -> None:
            while not is_over:
                await infer(repository, "m")
                await asyncio.sleep(0)

        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(ask())
            for number in range(50):
                cloud.bucket.write("m/1/weights", f"weights {number}")
                await repository.load("m")
            is_over = True
        assert len(loader.loaded) == 51
