import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.repositories import GatedLoader, infer, open_repository, write_model

from modelserver.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnloadedError,
)
from modelserver.repository.layout import INCOMPLETE_MARKER
from modelserver.repository.lifecycles import StartupError
from modelserver.repository.options import ControlMode, RepositoryOptions
from modelserver.repository.repository import ModelRepository

NONE, POLL = ControlMode.NONE, ControlMode.POLL
TENSORS = (
    '"input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}],'
    ' "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}]}'
)
ALL = "version_policy { all { } }"


def rows(repository: ModelRepository) -> list[tuple[str, int | None, str, str]]:
    return [(row.name, row.version, row.state.value, row.reason) for row in repository.index()]


def states(repository: ModelRepository) -> dict[tuple[str, int | None], str]:
    return {(row.name, row.version): row.state.value for row in repository.index()}


# Start.


async def test_mode_none_loads_everything(tmp_path: Path) -> None:
    write_model(tmp_path, "a", versions=(1, 2), extra=ALL)
    write_model(tmp_path, "b")
    async with open_repository(tmp_path, control_mode=NONE) as repository:
        assert rows(repository) == [("a", 1, "READY", ""), ("a", 2, "READY", ""), ("b", 1, "READY", "")]
        assert [(model.name, model.version) for model in repository.models()] == [("a", 1), ("a", 2), ("b", 1)]
        assert repository.is_ready(strict=True)
        await infer(repository, "b", 7)


async def test_mode_explicit_loads_what_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    async with open_repository(tmp_path, load_models=("a",)) as repository:
        assert rows(repository) == [("a", 1, "READY", ""), ("b", None, "UNKNOWN", "")]
        assert repository.is_ready(strict=True)


async def test_mode_explicit_loads_all_for_a_star(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    async with open_repository(tmp_path, load_models=("*",)) as repository:
        assert states(repository) == {("a", 1): "READY", ("b", 1): "READY"}


async def test_a_star_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--load-model=\*"):
        async with open_repository(tmp_path, load_models=("*", "a")):
            pass


async def test_a_model_to_load_must_exist(tmp_path: Path) -> None:
    async with open_repository(tmp_path, load_models=("missing",)) as repository:
        ((name, version, state, reason),) = rows(repository)
        assert (name, version, state) == ("missing", None, "UNAVAILABLE")
        assert str(tmp_path) in reason
        assert not repository.is_ready(strict=True)
        assert repository.is_ready(strict=False)


async def test_exit_on_error_lists_every_failure(tmp_path: Path) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad", config="nonsense")
    write_model(tmp_path, "worse", versions=())
    with pytest.raises(StartupError) as caught:
        async with open_repository(tmp_path, control_mode=NONE, is_exit_on_error=True):
            pass
    assert caught.value.failures.keys() == {"bad", "worse"}
    assert "no version directories" in caught.value.message


async def test_bad_models_stand_beside_good_ones(tmp_path: Path) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad", config="nonsense")
    async with open_repository(tmp_path, control_mode=NONE) as repository:
        assert states(repository) == {("bad", None): "UNAVAILABLE", ("good", 1): "READY"}
        assert "nonsense" in rows(repository)[0][3]
        assert not repository.is_ready(strict=True)
        await infer(repository, "good")
        with pytest.raises(UnavailableError, match="nonsense"):
            repository.get("bad", None)


@pytest.mark.parametrize("roots", [("missing",), ()])
async def test_roots_must_be_there(tmp_path: Path, roots: tuple[str, ...]) -> None:
    with pytest.raises((NotFoundError, InvalidArgumentError), match="model repository"):
        async with open_repository(*(tmp_path / root for root in roots)):
            pass


async def test_duplicates_are_not_loaded_and_the_index_says_so(tmp_path: Path) -> None:
    for root in ("one", "two"):
        write_model(tmp_path / root, "both")
    write_model(tmp_path / "two", "good")
    async with open_repository(tmp_path / "one", tmp_path / "two", control_mode=NONE) as repository:
        assert states(repository) == {("both", None): "UNAVAILABLE", ("good", 1): "READY"}
        assert str(tmp_path / "one" / "both") in rows(repository)[0][3]
        assert not repository.is_ready(strict=True)
        with pytest.raises(UnavailableError, match="two or more repositories"):
            repository.get("both", None)


async def test_a_single_model_directory_is_served_under_the_given_name(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "export")
    (tmp_path / "models").symlink_to(directory)
    async with open_repository(tmp_path / "models", control_mode=NONE, model_name="served") as repository:
        assert rows(repository) == [("served", 1, "READY", "")]
        await infer(repository, "served")


async def test_not_ready_while_starting_nor_when_stopping(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    loader.hold("a")
    repository = ModelRepository(RepositoryOptions((tmp_path,)), load_model=loader)
    starting = asyncio.create_task(repository.start())
    await loader.reached("a")
    assert not repository.is_ready(strict=False)
    assert rows(repository) == [("a", 1, "LOADING", "")]
    with pytest.raises(UnavailableError, match="LOADING"):
        repository.get("a", None)
    loader.release("a")
    assert await starting == {}
    assert repository.is_ready(strict=True)
    await repository.stop(5)
    assert not repository.is_ready(strict=False)


# Look-up.


async def test_get_finds_the_highest_version_or_the_one_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, "a", versions=(2, 10), extra=ALL)
    async with open_repository(tmp_path, control_mode=NONE) as repository:
        assert repository.get("a", None).version == 10
        assert repository.get("a", 2).version == 2
        assert repository.ready_versions("a") == (2, 10)
        with pytest.raises(NotFoundError, match=r"version 3 is not found; ready versions: 2, 10"):
            repository.get("a", 3)


async def test_unknown_models_are_not_found_with_the_nearest_name(tmp_path: Path) -> None:
    write_model(tmp_path, "resnet50")
    async with open_repository(tmp_path, control_mode=NONE) as repository:
        with pytest.raises(NotFoundError) as caught:
            repository.get("resnet", None)
        assert caught.value.message.startswith("Request for unknown model: 'resnet' is not found")
        assert "did you mean 'resnet50'?" in caught.value.message
        assert repository.ready_versions("resnet") == ()


# Load and unload on request.


@pytest.mark.parametrize(("mode", "words"), [(NONE, "is 'none'"), (POLL, "is not allowed if polling is enabled")])
async def test_only_mode_explicit_takes_requests(tmp_path: Path, mode: ControlMode, words: str) -> None:
    async with open_repository(tmp_path, control_mode=mode) as repository:
        for operation in (repository.load("a"), repository.unload("a")):
            with pytest.raises(UnavailableError, match="--model-control-mode=explicit") as caught:
                await operation
            assert words in caught.value.message


async def test_loads_and_unloads_are_logged_in_triton_s_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "modelserver")
    write_model(tmp_path, "a")
    async with open_repository(tmp_path) as repository:
        await repository.load("a")
        assert [text for text in caplog.messages if text.startswith("successfully loaded 'a'")]
        await repository.unload("a")
        await repository._lifecycles["a"].wait_idle()
    assert "successfully unloaded 'a' version 1" in caplog.messages


async def test_load_and_unload(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    async with open_repository(tmp_path) as repository:
        with pytest.raises(NotFoundError):
            repository.get("a", None)
        await repository.load("a")
        await infer(repository, "a")
        await repository.unload("a")
        await repository._lifecycles["a"].wait_idle()
        with pytest.raises(UnloadedError, match=r"no available versions: version 1 is UNAVAILABLE \(unloaded\)"):
            repository.get("a", None)
        with pytest.raises(UnloadedError, match="not at ready state"):
            repository.get("a", 1)
        assert repository.is_ready(strict=True)
        await repository.load("a")
        await infer(repository, "a")


async def test_an_unloaded_model_stays_in_the_index(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, load_models=("a",), loader=loader) as repository:
        await repository.unload("a")
        assert rows(repository)[0][2] in ("UNLOADING", "UNAVAILABLE")
        await repository._lifecycles["a"].wait_idle()
        assert rows(repository) == [("a", 1, "UNAVAILABLE", "unloaded")]
        assert loader.closed == loader.loaded


async def test_an_unknown_model_is_not_loaded_nor_remembered(tmp_path: Path) -> None:
    write_model(tmp_path, "resnet50")
    async with open_repository(tmp_path) as repository:
        with pytest.raises(NotFoundError, match="did you mean 'resnet50'"):
            await repository.load("resnet")
        assert rows(repository) == [("resnet50", None, "UNKNOWN", "")]
        assert repository.is_ready(strict=True)
        await repository.unload("resnet")


@pytest.mark.parametrize("name", ["", " ", "../a", "a/../b", "a\n"])
async def test_names_are_checked(tmp_path: Path, name: str) -> None:
    async with open_repository(tmp_path) as repository:
        for operation in (repository.load(name), repository.unload(name)):
            with pytest.raises(InvalidArgumentError, match=r"^(invalid model name|Model name cannot be empty\.)"):
                await operation


async def test_a_new_model_appears_in_the_index(tmp_path: Path) -> None:
    async with open_repository(tmp_path) as repository:
        assert rows(repository) == []
        write_model(tmp_path, "a")
        assert rows(repository) == [("a", None, "UNKNOWN", "")]


async def test_a_model_marked_as_incomplete_is_held_back(tmp_path: Path) -> None:
    marker = write_model(tmp_path, "a") / INCOMPLETE_MARKER
    marker.touch()
    async with open_repository(tmp_path) as repository:
        with pytest.raises(UnavailableError, match=INCOMPLETE_MARKER):
            await repository.load("a")
        marker.unlink()
        await repository.load("a")


async def test_loading_a_duplicate_is_refused(tmp_path: Path) -> None:
    for root in ("one", "two"):
        write_model(tmp_path / root, "both")
    async with open_repository(tmp_path / "one", tmp_path / "two") as repository:
        with pytest.raises(AlreadyExistsError):
            await repository.load("both")
        assert repository.is_ready(strict=True)


async def test_models_and_readiness_follow_each_change(tmp_path: Path) -> None:
    loader = GatedLoader()
    for name in ("a", "b"):
        write_model(tmp_path, name)
    async with open_repository(tmp_path, loader=loader, load_models=("a",)) as repository:
        before = repository.models()
        assert repository.models() is before  # a scrape of unchanged models looks at none of them
        loader.fail("b", 1)
        with pytest.raises(InvalidArgumentError):
            await repository.load("b")
        [reason] = repository.unready_because(strict=True)
        assert reason.startswith("model 'b' does not serve")
        loader.failures.clear()
        await repository.load("b")
        assert repository.is_ready(strict=True)
        assert [model.name for model in repository.models()] == ["a", "b"]
        await repository.unload("a")
        assert [model.name for model in repository.models()] == ["b"]
        assert repository.is_ready(strict=True)


async def test_load_counts(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, load_models=("a",)) as repository:
        first = repository.load_counts()["a"]
        assert (first.successes, first.failures) == (1, 0)
        assert first.last_duration_s > 0
        (tmp_path / "a" / "1" / "weights").write_text("changed weights")
        loader.fail("a", 1)
        with pytest.raises(InvalidArgumentError):
            await repository.load("a")
        counts = repository.load_counts()["a"]
        assert (counts.successes, counts.failures, counts.last_duration_s) == (1, 1, first.last_duration_s)


# Polling.


async def poll(repository: ModelRepository, times: int = 2) -> None:
    assert repository._poller is not None
    for _ in range(times):
        await repository._poller.poll_once()
        await repository._poller.wait_idle()


async def test_polling_follows_the_files(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    async with open_repository(tmp_path, control_mode=POLL) as repository:
        first = repository.get("a", None)
        await poll(repository)
        assert repository.get("a", None) is first
        write_model(tmp_path, "a", versions=(2,))
        write_model(tmp_path, "b")
        await poll(repository)
        assert repository.get("a", None).version == 2
        await infer(repository, "b")
        shutil.rmtree(tmp_path / "b")
        await poll(repository)
        with pytest.raises(UnavailableError):
            repository.get("b", None)
        assert repository.is_ready(strict=True)


async def test_polling_leaves_a_copy_in_progress_alone(tmp_path: Path) -> None:
    loader = GatedLoader()
    async with open_repository(tmp_path, control_mode=POLL, loader=loader) as repository:
        directory = write_model(tmp_path, "a")
        for size in range(1, 5):
            (directory / "1" / "weights").write_bytes(b"x" * size * 100)
            await poll(repository, times=1)
        assert loader.num_attempts == 0
        await poll(repository, times=1)
        await infer(repository, "a")


async def test_polling_waits_for_the_marker_to_go(tmp_path: Path) -> None:
    async with open_repository(tmp_path, control_mode=POLL) as repository:
        marker = write_model(tmp_path, "a") / INCOMPLETE_MARKER
        marker.touch()
        await poll(repository, times=3)
        assert states(repository) == {("a", None): "UNKNOWN"}
        marker.unlink()
        await poll(repository)
        await infer(repository, "a")


async def test_polling_keeps_the_old_version_when_the_new_one_is_bad(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    async with open_repository(tmp_path, control_mode=POLL) as repository:
        write_model(tmp_path, "a", config="nonsense")
        write_model(tmp_path, "b")
        await poll(repository)
        await infer(repository, "a")
        await infer(repository, "b")
        ((_, _, state, reason), _) = rows(repository)
        assert state == "READY"
        assert "nonsense" in reason
        write_model(tmp_path, "a", versions=(2,))
        await poll(repository)
        assert rows(repository)[0][:3] != ("a", 1, "READY")
        assert repository.get("a", None).version == 2
        assert [row[3] for row in rows(repository) if row[2] == "READY"] == ["", ""]


async def test_polling_does_not_unload_what_becomes_a_duplicate(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "a")
    (tmp_path / "two").mkdir()
    async with open_repository(tmp_path / "one", tmp_path / "two", control_mode=POLL) as repository:
        write_model(tmp_path / "two", "a")
        await poll(repository, times=3)
        await infer(repository, "a")
        assert "two or more repositories" in rows(repository)[0][3]
        shutil.rmtree(tmp_path / "one" / "a")
        await poll(repository)
        assert repository._lifecycles["a"].loaded[1].definition.model_directory == tmp_path / "two" / "a"


async def test_polling_ignores_a_repository_that_vanishes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "root", "a")
    async with open_repository(tmp_path / "root", control_mode=POLL) as repository:
        (tmp_path / "root").rename(tmp_path / "away")
        await poll(repository, times=3)
        await infer(repository, "a")
    assert "cannot be read" in caplog.text


# Stop.


async def test_stop_answers_what_is_in_flight_and_then_closes(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra='parameters { key: "execute_delay_ms" value { string_value: "50" } }')
    async with open_repository(tmp_path, load_models=("a",)) as repository:
        answers = [asyncio.create_task(infer(repository, "a", value)) for value in range(3)]
        await asyncio.sleep(0)
        await repository.stop(5)
        assert all(answer.done() for answer in answers)
        await asyncio.gather(*answers)
        with pytest.raises(UnavailableError, match="shutting down"):
            await repository.load("a")


async def test_stop_out_of_time_closes_all_the_same(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra='parameters { key: "execute_delay_ms" value { string_value: "300" } }')
    async with open_repository(tmp_path, load_models=("a",)) as repository:
        answers = [asyncio.create_task(infer(repository, "a", value)) for value in range(2)]
        await asyncio.sleep(0)
        await repository.stop(0)
        results = await asyncio.gather(*answers, return_exceptions=True)
        assert any(isinstance(result, UnavailableError) for result in results)


async def test_stop_during_a_load_leaves_no_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader) as repository:
        loader.hold("a")
        loading = asyncio.create_task(repository.load("a"))
        await loader.reached("a")
        with pytest.raises(TimeoutError, match=r"models still busy.*: a"):
            await repository.stop(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await loading
        loader.release("a")
        await asyncio.to_thread(repository._pools.load.shutdown)
        await asyncio.to_thread(repository._pools.close.shutdown)
        assert len(loader.loaded) == 1


async def test_a_load_that_meets_the_stop_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "m")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader) as repository:
        # While it is looked whether there is such a model, the stop begins.
        def stop_begins(*_: object) -> None:
            repository._opened.models.is_stopping = True

        monkeypatch.setattr(repository._opened.loader, "check_exists", stop_begins)
        with pytest.raises(UnavailableError, match="shutting down"):
            await repository.load("m")
    assert loader.loaded == []


# Loads of models whose files have not changed.


def age(directory: Path) -> None:
    """Let the files be an hour old, so that no change of them can have gone unseen."""
    for path in directory.rglob("*"):
        if path.is_file():
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 3600 * 10**9))


async def test_a_load_of_an_unchanged_model_reads_no_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    age(write_model(tmp_path, "m"))
    caplog.set_level(logging.INFO)
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        model = repository.get("m", None)
        await repository.load("m")
        assert "its files have not changed" in caplog.text
        assert repository.get("m", None) is model
        assert repository.load_counts()["m"].successes == 2


def _another_config(directory: Path) -> None:
    text = (directory / "config.pbtxt").read_text()
    (directory / "config.pbtxt").write_text(text.replace("max_batch_size: 8", "max_batch_size: 4"))


def _another_version(directory: Path) -> None:
    shutil.copytree(directory / "1", directory / "2")


def _other_weights(directory: Path) -> None:
    (directory / "1" / "weights").write_text("others")


@pytest.mark.parametrize("change", [_another_config, _another_version, _other_weights])
async def test_any_change_of_files_is_loaded(tmp_path: Path, change: Callable[[Path], None]) -> None:
    directory = write_model(tmp_path, "m")
    age(directory)
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        model = repository.get("m", None)
        await repository.load("m")
        assert repository.get("m", None) is model
        change(directory)
        await repository.load("m")
        assert repository.get("m", None) is not model
        changed = repository.get("m", None)
        await repository.load("m")
        assert repository.get("m", None) is changed


async def test_a_change_within_one_tick_of_the_clock_is_loaded(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m")
    config = directory / "config.pbtxt"
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        stamp = config.stat()
        _another_config(directory)
        os.utime(config, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        await repository.load("m")
        assert repository.get("m", None).config.max_batch_size == 4


async def test_a_load_ends_what_an_override_or_a_lone_version_changed(tmp_path: Path) -> None:
    age(write_model(tmp_path, "m", versions=(1, 2)))
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        await repository.load("m", config_json='{"backend": "identity", "max_batch_size": 2, ' + TENSORS)
        assert repository.get("m", None).config.max_batch_size == 2
        await repository.load("m")
        assert repository.get("m", None).config.max_batch_size == 2
        await repository.load("m", drops_override=True)
        assert repository.get("m", None).config.max_batch_size == 8
        with pytest.raises(InvalidArgumentError, match="'override': false is for loads without 'config'"):
            await repository.load("m", config_json="{}", drops_override=True)
        await repository.load("m", version=1)
        assert repository.ready_versions("m") == (1, 2)
        await repository.load("m")
        assert repository.ready_versions("m") == (2,)


async def test_a_load_of_an_unchanged_model_forgets_the_failure_before(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m")
    age(directory)
    config = directory / "config.pbtxt"
    good, stamp = config.read_text(), config.stat()
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        config.write_text("nonsense")
        with pytest.raises(InvalidArgumentError):
            await repository.load("m")
        assert "nonsense" in rows(repository)[0][3]
        config.write_text(good)
        os.utime(config, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        await repository.load("m")
        assert rows(repository) == [("m", 1, "READY", "")]


async def test_a_marked_model_is_held_back_though_its_files_have_not_changed(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m")
    age(directory)
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        (directory / INCOMPLETE_MARKER).touch()
        with pytest.raises(UnavailableError, match="incomplete"):
            await repository.load("m")
