"""How a reload replaces what serves: beside it, after it has left, or instance by instance."""

import asyncio
from pathlib import Path

import pytest
from support.gate import until
from support.repositories import GatedLoader, infer, open_repository, write_model

from modelserver.config.pbtxt import read_pbtxt
from modelserver.config.schema import ModelConfig
from modelserver.errors import InternalError, LoadOnDemandError, ServerError
from modelserver.repository.reload import can_roll, num_instances, with_instances
from modelserver.repository.repository import ModelRepository

COUNT = "instance_group [ { kind: KIND_CPU count: %d } ]\n"


def mode(word: str, extra: str = "") -> str:
    return f'parameters {{ key: "reload_mode" value {{ string_value: "{word}" }} }}\n{extra}'


def change(root: Path, name: str) -> None:
    (root / name / "1" / "weights").write_text("other weights, of another size")


def config(groups: str) -> ModelConfig:
    return read_pbtxt(f'backend: "identity" {groups}', "test").config


async def test_unload_first_never_has_both_in_memory(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra=mode("unload_first"))
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, load_models=("a",)) as repository:
        change(tmp_path, "a")
        loader.hold("a")
        loading = asyncio.create_task(repository.load("a"))
        await loader.reached("a")
        assert loader.closed == loader.loaded, "the old one is closed before the new one is loaded"
        with pytest.raises(LoadOnDemandError) as caught:  # requests wait for the end of the load
            repository.get("a", None)
        waiting = asyncio.ensure_future(caught.value.load())
        loader.release("a")
        await asyncio.gather(loading, waiting)
        await infer(repository, "a")
        assert len(loader.loaded) == 2


async def test_what_left_first_comes_back_when_the_new_one_fails(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra=mode("unload_first"))
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, load_models=("a",)) as repository:
        old_load, loads = loader.__class__.__call__, iter([InternalError("too big")])

        def fail_once(self: GatedLoader, *arguments: object) -> object:
            for error in loads:
                raise error
            return old_load(self, *arguments)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GatedLoader, "__call__", fail_once)
            with pytest.raises(ServerError, match="too big"):
                await repository.load(
                    "a",
                    config_json='{"backend": "identity", "max_batch_size": 4, "parameters": '
                    '{"reload_mode": {"string_value": "unload_first"}}}',
                )
        await infer(repository, "a")
        assert repository.get("a", None).config.max_batch_size == 8


async def test_what_left_and_has_lost_its_files_stays_away(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra=mode("unload_first"))
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, load_models=("a",)) as repository:
        change(tmp_path, "a")
        loader.fail("a", 1)
        with pytest.raises(ServerError, match="out of memory"):
            await repository.load("a")
        with pytest.raises(ServerError, match="out of memory") as caught:
            repository.get("a", None)
        assert not isinstance(caught.value, LoadOnDemandError)


async def test_rolling_goes_instance_by_instance(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra=mode("rolling", COUNT % 4))
    loader = GatedLoader()
    most = 0

    async def watch(repository: ModelRepository) -> None:
        nonlocal most
        while True:
            open_models = [model for model in loader.loaded if model not in loader.closed]
            most = max(most, sum(len(model.instances()) for model in open_models))
            await infer(repository, "a")
            await asyncio.sleep(0)

    async with open_repository(tmp_path, loader=loader, load_models=("a",)) as repository:
        change(tmp_path, "a")
        watching = asyncio.create_task(watch(repository))
        await repository.load("a")
        watching.cancel()
        await asyncio.wait([watching])
        assert watching.cancelled(), "every request was answered"
        assert most <= 6, "the new instances come one by one, and the old ones go"
        assert len(repository.get("a", None).instances()) == 4
        await until(lambda: len(loader.closed) == 1, "the old one was closed")
        await repository.load("a")
        assert len(loader.loaded) == 2, "it is what the config says now"


async def test_a_rolling_reload_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra=mode("rolling", COUNT % 3))
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, load_models=("a",)) as repository:
        change(tmp_path, "a")
        loader.fail("a", 1)
        with pytest.raises(ServerError, match="out of memory"):
            await repository.load("a")
        await infer(repository, "a")
        assert len(repository.get("a", None).instances()) == 3


def test_instances_are_the_first_of_a_config() -> None:
    two = config("instance_group [ { count: 2 kind: KIND_CPU }, { count: 3 kind: KIND_GPU } ]")
    assert num_instances(two) == 5
    assert [group.count for group in with_instances(two, 1).instance_group] == [1]
    assert [group.count for group in with_instances(two, 4).instance_group] == [2, 2]
    assert with_instances(two, 9) == two
    assert can_roll(two, two)
    assert not can_roll(two, config("instance_group [ { count: 1 } ]"))
    assert not can_roll(two, config("instance_group [ { count: 4 } ] sequence_batching { }"))
