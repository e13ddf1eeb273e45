"""Loading and unloading one version of a model, which leaves the others alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.repositories import GatedLoader, infer, open_repository, write_model

from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnloadedError
from modelserver.repository.repository import ModelRepository


@pytest.fixture
async def loader() -> GatedLoader:
    return GatedLoader()


@pytest.fixture
async def repository(tmp_path: Path, loader: GatedLoader) -> AsyncIterator[ModelRepository]:
    """A model of three versions, of which the policy serves the last."""
    write_model(tmp_path, "m", versions=(1, 2, 3))
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        yield repository


def states(repository: ModelRepository) -> dict[int | None, tuple[str, str]]:
    return {row.version: (row.state.value, row.reason) for row in repository.index()}


async def test_a_version_that_the_policy_leaves_out_serves_beside_the_others(repository: ModelRepository) -> None:
    third = repository.get("m", None)
    await repository.load("m", version=1)
    assert repository.ready_versions("m") == (1, 3)
    assert repository.get("m", 3) is third
    await infer(repository, "m", 5, version=1)
    assert repository.get("m", None) is third, "the highest one answers requests without a version"


async def test_a_plain_load_goes_back_to_the_policy(repository: ModelRepository) -> None:
    await repository.load("m", version=1)
    await repository.load("m")
    assert repository.ready_versions("m") == (3,)
    await repository._lifecycles["m"].wait_idle()
    assert states(repository) == {1: ("UNAVAILABLE", "unloaded"), 3: ("READY", "")}


async def test_loading_a_version_again_takes_its_new_files_only(
    repository: ModelRepository, loader: GatedLoader, tmp_path: Path
) -> None:
    await repository.load("m", version=2)
    second, third = repository.get("m", 2), repository.get("m", 3)
    await repository.load("m", version=2)
    assert repository.get("m", 2) is second, "nothing has changed"
    for version in (2, 3):
        (tmp_path / "m" / str(version) / "weights").write_text("other weights")
    await repository.load("m", version=2)
    assert repository.get("m", 2) is not second
    assert repository.get("m", 3) is third


async def test_unloading_a_version(repository: ModelRepository) -> None:
    await repository.load("m", version=2)
    await repository.unload("m", version=3)
    assert repository.ready_versions("m") == (2,)
    assert repository.get("m", None).version == 2
    await repository._lifecycles["m"].wait_idle()
    assert states(repository) == {2: ("READY", ""), 3: ("UNAVAILABLE", "unloaded")}
    with pytest.raises(UnloadedError, match="version 3 is not at ready state"):
        repository.get("m", 3)
    await repository.load("m", version=3)
    assert repository.ready_versions("m") == (2, 3)


async def test_unloading_what_is_not_loaded_is_no_error(repository: ModelRepository) -> None:
    await repository.unload("m", version=7)
    await repository.unload("unknown", version=1)
    assert repository.ready_versions("m") == (3,)


async def test_without_its_last_version_a_model_is_unloaded(repository: ModelRepository) -> None:
    await repository.unload("m", version=3)
    assert repository.is_ready(strict=True)
    with pytest.raises(UnavailableError, match="no available versions"):
        repository.get("m", None)


@pytest.mark.parametrize("name", ["m", "fresh"])
async def test_a_version_must_be_there(repository: ModelRepository, tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "fresh", versions=(1, 2))
    with pytest.raises(NotFoundError, match=rf"'{name}' has no version 9 in .*there are: 1, 2"):
        await repository.load(name, version=9)
    assert 9 not in states(repository)


async def test_a_model_may_begin_with_one_version(repository: ModelRepository, tmp_path: Path) -> None:
    write_model(tmp_path, "fresh", versions=(1, 2))
    await repository.load("fresh", version=1)
    assert repository.ready_versions("fresh") == (1,)


async def test_a_failure_is_of_the_version(repository: ModelRepository, loader: GatedLoader) -> None:
    loader.fail("m", 2)
    with pytest.raises(InvalidArgumentError, match="version 2 is at UNAVAILABLE state: Internal: out of memory"):
        await repository.load("m", version=2)
    assert states(repository) == {2: ("UNAVAILABLE", "Internal: out of memory"), 3: ("READY", "")}
    await repository.load("m", version=1)
    assert states(repository)[2][0] == "UNAVAILABLE", "another version's load does not forget it"
    loader.failures.clear()
    await repository.load("m", version=2)
    assert states(repository) == {1: ("READY", ""), 2: ("READY", ""), 3: ("READY", "")}


async def test_a_config_override_may_be_for_one_version(repository: ModelRepository) -> None:
    config = (
        '{"backend": "identity", "max_batch_size": 2, '
        '"input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}], '
        '"output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}]}'
    )
    await repository.load("m", config_json=config, version=2)
    assert [repository.get("m", version).config.max_batch_size for version in (2, 3)] == [2, 8]
    await repository.load("m", config_json=config, files={"7/weights": b"new"}, version=7)
    assert repository.ready_versions("m") == (2, 3, 7)


async def test_operations_on_different_versions_all_happen(repository: ModelRepository, loader: GatedLoader) -> None:
    loader.hold("m")
    first = asyncio.create_task(repository.load("m", version=1))
    await loader.reached("m")
    second = asyncio.create_task(repository.load("m", version=2))
    third = asyncio.create_task(repository.unload("m", version=3))
    await asyncio.sleep(0)
    loader.release("m")
    await asyncio.gather(first, second, third)
    assert repository.ready_versions("m") == (1, 2)


async def test_an_unload_of_the_version_gives_its_load_up(repository: ModelRepository, loader: GatedLoader) -> None:
    loader.hold("m")
    loading = asyncio.create_task(repository.load("m", version=1))
    await loader.reached("m")
    unloading = asyncio.create_task(repository.unload("m", version=1))
    await asyncio.sleep(0)
    assert repository._lifecycles["m"]._operations.is_unload_waiting(1)
    loader.release("m")
    with pytest.raises(UnavailableError, match="superseded"):
        await loading
    await unloading
    assert repository.ready_versions("m") == (3,)
