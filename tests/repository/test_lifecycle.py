import asyncio
import json
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.repositories import IDENTITY_CONFIG, GatedLoader, identity_request, infer, open_repository, write_model
from support.waiting import PATIENCE_S

from modelserver.config.message import config_to_json
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.errors import ConfigError, InvalidArgumentError, UnavailableError, UnsupportedError
from modelserver.repository.repository import ModelRepository

ALL = "version_policy { all { } }"
SLOW = 'parameters { key: "execute_delay_ms" value { string_value: "100" } }'


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """How long that takes, the test says: a batch that is to be slow ends when this is set."""
    may_end = threading.Event()

    def sleep(seconds: float) -> None:
        assert not seconds or may_end.wait(PATIENCE_S), "the test never let it end"

    monkeypatch.setattr("modelserver_backends.identity.time", SimpleNamespace(sleep=sleep))
    return may_end


@pytest.fixture
async def loader() -> GatedLoader:
    return GatedLoader()


def change(directory: Path, version: int = 1) -> None:
    """New weights, so that the next load has something to do."""
    path = directory / str(version) / "weights"
    path.write_text(path.read_text() + ", changed")


def states(repository: ModelRepository) -> dict[int | None, tuple[str, str]]:
    return {row.version: (row.state.value, row.reason) for row in repository.index() if row.name == "m"}


async def settle(repository: ModelRepository, name: str = "m") -> None:
    await repository._lifecycles[name].wait_idle()


# The swap.


async def test_the_old_version_serves_until_the_new_one_is_there(tmp_path: Path, loader: GatedLoader) -> None:
    directory = write_model(tmp_path, "m")
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        old = repository.get("m", None)
        change(directory)
        loader.hold("m")
        loading = asyncio.create_task(repository.load("m"))
        await loader.reached("m")
        assert repository.get("m", None) is old
        await infer(repository, "m")
        assert states(repository) == {1: ("READY", "")}
        loader.release("m")
        await loading
        assert repository.get("m", None) is not old
        await settle(repository)
        assert loader.closed == [old]


async def test_all_versions_are_swapped_in_one_step(tmp_path: Path, loader: GatedLoader) -> None:
    directory = write_model(tmp_path, "m", versions=(1, 2), extra=ALL)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        seen: set[tuple[int, ...]] = set()

        def look() -> None:
            both = [repository.get("m", version) for version in (1, 2)]
            assert repository.get("m", None) is both[1]
            seen.add(tuple(loader.loaded.index(model) for model in both))

        for version in (1, 2):
            change(directory, version)
        loading = asyncio.create_task(repository.load("m"))
        while not loading.done():
            look()
            await asyncio.sleep(0)
        look()
        assert {tuple(sorted(pair)) for pair in seen} == {(0, 1), (2, 3)}


async def test_in_flight_requests_of_the_old_version_are_answered(
    tmp_path: Path, loader: GatedLoader, delays: threading.Event
) -> None:
    directory = write_model(tmp_path, "m", extra=SLOW)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        answers = [asyncio.create_task(infer(repository, "m", value)) for value in range(3)]
        await asyncio.sleep(0)
        change(directory)
        await repository.load("m")
        assert not any(answer.done() for answer in answers)
        assert loader.closed == []
        delays.set()
        await asyncio.gather(*answers)
        await settle(repository)
        assert loader.closed == loader.loaded[:1]


async def test_unload_answers_what_is_in_flight_and_refuses_what_comes(
    tmp_path: Path, loader: GatedLoader, delays: threading.Event
) -> None:
    write_model(tmp_path, "m", extra=SLOW)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        model = repository.get("m", None)
        answer = asyncio.create_task(infer(repository, "m"))
        await asyncio.sleep(0)
        await repository.unload("m")
        assert states(repository) == {1: ("UNLOADING", "")}
        with pytest.raises(UnavailableError):
            model.submit(identity_request("m"))
        delays.set()
        await answer
        await settle(repository)
        assert states(repository) == {1: ("UNAVAILABLE", "unloaded")}


async def test_a_load_while_the_unloaded_version_still_drains(
    tmp_path: Path, loader: GatedLoader, delays: threading.Event
) -> None:
    write_model(tmp_path, "m", extra=SLOW)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        answer = asyncio.create_task(infer(repository, "m"))
        await asyncio.sleep(0)
        await repository.unload("m")
        await repository.load("m")
        assert states(repository) == {1: ("READY", "")}
        delays.set()
        await answer
        await settle(repository)
        assert states(repository) == {1: ("READY", "")}


# What is kept.


async def test_an_unchanged_model_is_kept_with_its_statistics(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m")
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        await infer(repository, "m")
        model = repository.get("m", None)
        await repository.load("m")
        assert repository.get("m", None) is model
        assert model.statistics.snapshot().inference_count == 1


async def test_only_new_and_changed_versions_are_loaded(tmp_path: Path, loader: GatedLoader) -> None:
    directory = write_model(tmp_path, "m", versions=(1, 2), extra=ALL)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        first, second = (repository.get("m", version) for version in (1, 2))
        change(directory, 2)
        write_model(tmp_path, "m", versions=(3,), extra=ALL)
        change(directory, 2)
        await repository.load("m")
        assert repository.get("m", 1) is first
        assert repository.get("m", 2) is not second
        assert repository.get("m", None).version == 3


async def test_a_version_that_is_no_longer_served_is_unloaded(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m")
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        write_model(tmp_path, "m", versions=(2,))
        await repository.load("m")
        await settle(repository)
        assert states(repository) == {1: ("UNAVAILABLE", "unloaded"), 2: ("READY", "")}


async def test_a_change_of_instance_groups_alone_is_made_in_place(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m", extra=SLOW)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        await infer(repository, "m")
        model = repository.get("m", None)
        write_model(tmp_path, "m", versions=(), extra=SLOW + "instance_group [ { count: 3 } ]")
        await repository.load("m")
        assert repository.get("m", None) is model
        assert len(model.instances()) == 3
        assert model.config.instance_group[0].count == 3
        assert model.statistics.snapshot().inference_count == 1
        await infer(repository, "m")


async def test_a_failed_change_of_instances_is_taken_back(
    tmp_path: Path, loader: GatedLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "m", versions=(1, 2), extra=ALL)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        first, second = (repository.get("m", version) for version in (1, 2))

        def refuse(config: object) -> None:
            raise UnavailableError("no room for more instances")

        monkeypatch.setattr(second, "update_instances", refuse)
        write_model(tmp_path, "m", versions=(), extra=ALL + "instance_group [ { count: 2 } ]")
        with pytest.raises(UnavailableError, match="no room"):
            await repository.load("m")
        assert len(first.instances()) == 1
        assert "no room" in states(repository)[1][1]
        await infer(repository, "m", version=1)


# Failure.


async def test_a_failed_reload_leaves_the_old_one_and_says_why(tmp_path: Path, loader: GatedLoader) -> None:
    directory = write_model(tmp_path, "m")
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        change(directory)
        loader.fail("m", 1)
        with pytest.raises(InvalidArgumentError) as caught:
            await repository.load("m")
        assert caught.value.message == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: out of memory;"
        )
        assert states(repository) == {1: ("READY", "Internal: out of memory")}
        assert repository.is_ready(strict=True)
        await infer(repository, "m")
        loader.failures.clear()
        await repository.load("m")
        assert states(repository) == {1: ("READY", "")}


async def test_one_bad_version_fails_the_transaction(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m", versions=(1, 2, 3), extra=ALL)
    for version in (1, 3):
        loader.fail("m", version)
    async with open_repository(tmp_path, loader=loader) as repository:
        with pytest.raises(InvalidArgumentError) as caught:
            await repository.load("m")
        assert "version 1 is at UNAVAILABLE state: Internal: out of memory; version 3 is" in caught.value.message
        assert {version: state for version, (state, _) in states(repository).items()} == {
            1: "UNAVAILABLE",
            2: "UNAVAILABLE",
            3: "UNAVAILABLE",
        }
        assert [model.version for model in loader.closed] == [2]
        assert not repository.is_ready(strict=True)


async def test_the_index_tells_why_a_model_that_was_unloaded_does_not_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        await repository.unload("m")
        await settle(repository)
        write_model(tmp_path, "m", config="nonsense")
        with pytest.raises(ConfigError):
            await repository.load("m")
        assert states(repository)[1][0] == "UNAVAILABLE"
        assert "nonsense" in states(repository)[1][1]


async def test_what_is_not_executed_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, "m", extra='runtime: "onnxruntime_other"')
    async with open_repository(tmp_path) as repository:
        with pytest.raises(UnsupportedError, match="runtime"):
            await repository.load("m")


async def test_a_fault_of_a_backend_is_an_internal_error(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m")
    loader.fail("m", 1, ZeroDivisionError("1/0"))
    async with open_repository(tmp_path, loader=loader) as repository:
        with pytest.raises(InvalidArgumentError, match=r"Internal: .*ZeroDivisionError: 1/0"):
            await repository.load("m")


@pytest.mark.parametrize("num_retries", [0, 2])
async def test_a_failed_load_is_tried_again_as_often_as_told(
    tmp_path: Path, loader: GatedLoader, num_retries: int
) -> None:
    write_model(tmp_path, "m")
    loader.fail("m", 1)
    async with open_repository(tmp_path, loader=loader, load_retry_count=num_retries) as repository:
        with pytest.raises(InvalidArgumentError):
            await repository.load("m")
        assert loader.num_attempts == num_retries + 1


async def test_files_that_change_while_they_are_loaded_do_not_serve(tmp_path: Path, loader: GatedLoader) -> None:
    directory = write_model(tmp_path, "m")
    async with open_repository(tmp_path, loader=loader) as repository:
        loader.hold("m")
        loading = asyncio.create_task(repository.load("m"))
        await loader.reached("m")
        change(directory)
        loader.release("m")
        with pytest.raises(InvalidArgumentError, match="changed while they were being loaded"):
            await loading
        assert loader.closed == loader.loaded


async def test_a_cache_that_a_backend_writes_is_no_change(tmp_path: Path, loader: GatedLoader) -> None:
    directory = write_model(tmp_path, "m")
    async with open_repository(tmp_path, loader=loader) as repository:
        loader.hold("m")
        loading = asyncio.create_task(repository.load("m"))
        await loader.reached("m")
        (directory / "1" / "engine.cache").write_text("")
        loader.release("m")
        await loading


# Several operations.


async def test_a_slow_load_delays_no_other_model(tmp_path: Path, loader: GatedLoader) -> None:
    for name in ("slow", "quick"):
        write_model(tmp_path, name)
    async with open_repository(tmp_path, loader=loader) as repository:
        loader.hold("slow")
        slow = asyncio.create_task(repository.load("slow"))
        await loader.reached("slow")
        await repository.load("quick")
        await infer(repository, "quick")
        assert repository.is_ready(strict=True)
        loader.release("slow")
        await slow


async def test_different_models_load_at_the_same_time_up_to_the_thread_count(
    tmp_path: Path, loader: GatedLoader
) -> None:
    names = [f"m{number}" for number in range(5)]
    for name in names:
        write_model(tmp_path, name)
    async with open_repository(tmp_path, loader=loader, load_thread_count=4) as repository:
        for name in names:
            loader.hold(name)
        loads = [asyncio.create_task(repository.load(name)) for name in names]
        arrivals = {asyncio.create_task(loader.reached(name)) for name in names}
        while len(arrivals) > 1:  # any four of the five
            _, arrivals = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
        arrivals.pop().cancel()
        assert loader.num_attempts == 4
        for name in names:
            loader.release(name)
        await asyncio.gather(*loads)


async def test_operations_on_one_model_run_one_after_the_other(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m")
    async with open_repository(tmp_path, loader=loader) as repository:
        loader.hold("m")
        first = asyncio.create_task(repository.load("m"))
        await loader.reached("m")
        others = [asyncio.create_task(repository.load("m")) for _ in range(10)]
        await asyncio.sleep(0)
        assert loader.num_attempts == 1
        loader.release("m")
        await asyncio.gather(first, *others)
        assert repository.load_counts()["m"].successes == 2
        assert loader.num_attempts == 1


async def test_a_newer_operation_supersedes_one_that_waits(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m")
    config = json.dumps(config_to_json(parse_pbtxt(IDENTITY_CONFIG + "dynamic_batching { }").config))
    async with open_repository(tmp_path, loader=loader) as repository:
        loader.hold("m")
        running = asyncio.create_task(repository.load("m"))
        await loader.reached("m")
        waiting = asyncio.create_task(repository.load("m", config_json=config))
        await asyncio.sleep(0)
        newest = asyncio.create_task(repository.load("m"))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="superseded by a newer load"):
            await waiting
        loader.release("m")
        await asyncio.gather(running, newest)


async def test_an_unload_makes_a_running_load_pointless(tmp_path: Path, loader: GatedLoader) -> None:
    directory = write_model(tmp_path, "m")
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        change(directory)
        loader.hold("m")
        loading = asyncio.create_task(repository.load("m"))
        await loader.reached("m")
        unloading = asyncio.create_task(repository.unload("m"))
        await asyncio.sleep(0)
        loader.release("m")
        with pytest.raises(UnavailableError, match="superseded by a newer unload"):
            await loading
        await unloading
        await settle(repository)
        assert states(repository) == {1: ("UNAVAILABLE", "unloaded")}
        assert repository.is_ready(strict=True)


async def test_a_caller_that_leaves_does_not_stop_the_load(tmp_path: Path, loader: GatedLoader) -> None:
    write_model(tmp_path, "m")
    async with open_repository(tmp_path, loader=loader) as repository:
        loader.hold("m")
        loading = asyncio.create_task(repository.load("m"))
        await loader.reached("m")
        loading.cancel()
        loader.release("m")
        await settle(repository)
        await infer(repository, "m")


# Overrides.


def as_json(text: str) -> str:
    return json.dumps(config_to_json(parse_pbtxt(text).config))


@pytest.fixture
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "temporary"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_file_overrides_replace_the_directory_and_vanish_with_the_last_version(
    tmp_path: Path, temporary_root: Path
) -> None:
    write_model(tmp_path / "root", "m", versions=(1,))
    config = as_json(IDENTITY_CONFIG + ALL)
    async with open_repository(tmp_path / "root", load_models=("m",)) as repository:
        await repository.load("m", config_json=config, files={"3/weights": b"3", "4/weights": b"4"})
        assert repository.ready_versions("m") == (3, 4)
        (directory,) = entries(temporary_root)
        assert (directory / "4" / "weights").read_bytes() == b"4"
        await repository.load("m")
        assert repository.ready_versions("m") == (1,)
        await settle(repository)
        assert entries(temporary_root) == []


async def test_a_model_may_consist_of_overrides_alone(tmp_path: Path, temporary_root: Path) -> None:
    (tmp_path / "root").mkdir()
    async with open_repository(tmp_path / "root") as repository:
        await repository.load("m", config_json=as_json(IDENTITY_CONFIG), files={"1/weights": b""})
        await infer(repository, "m")
        await repository.unload("m")
        await settle(repository)
        assert entries(temporary_root) == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"../escape": b""}, "invalid file override path"),
        ({"weights": b""}, "no version directories"),
    ],
)
async def test_overrides_that_make_no_model_leave_nothing(
    tmp_path: Path, temporary_root: Path, files: dict[str, bytes], words: str
) -> None:
    write_model(tmp_path / "root", "m")
    async with open_repository(tmp_path / "root", load_models=("m",)) as repository:
        with pytest.raises(InvalidArgumentError, match=words):
            await repository.load("m", config_json=as_json(IDENTITY_CONFIG), files=files)
        await infer(repository, "m")
    assert entries(temporary_root) == []


async def test_file_overrides_need_a_config(tmp_path: Path) -> None:
    async with open_repository(tmp_path) as repository:
        with pytest.raises(InvalidArgumentError, match="need the parameter 'config'"):
            await repository.load("m", files={"1/weights": b""})


async def test_each_load_warns_once_of_what_has_no_effect(
    tmp_path: Path, loader: GatedLoader, caplog: pytest.LogCaptureFixture
) -> None:
    extra = f"{ALL} optimization {{ graph {{ level: 1 }} }}"
    directory = write_model(tmp_path, "m", versions=(1, 2), extra=extra)
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        for num_loads in (1, 2):
            warnings = [record.getMessage() for record in caplog.records if "optimization.graph" in record.getMessage()]
            assert len(warnings) == num_loads
            change(directory)
            await repository.load("m")
    assert warnings[0].startswith("model 'm': ")
    assert "optimization.graph: has no effect in this version: " in warnings[0]


async def test_a_request_that_makes_no_sense_leaves_no_trace(tmp_path: Path) -> None:
    async with open_repository(tmp_path) as repository:
        with pytest.raises(InvalidArgumentError, match="invalid file override path"):
            await repository.load("m", config_json=as_json(IDENTITY_CONFIG), files={"../weights": b""})
        assert repository.index() == []
        assert repository.is_ready(strict=True)
