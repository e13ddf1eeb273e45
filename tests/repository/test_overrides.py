"""Overrides that are kept, over several lives of a repository."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.repositories import IDENTITY_CONFIG, infer, open_repository, write_model

from modelserver.config.message import config_to_json
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.errors import InvalidArgumentError
from modelserver.repository.options import ControlMode
from modelserver.repository.repository import ModelRepository


def config(max_batch_size: int) -> str:
    return json.dumps(config_to_json(parse_pbtxt(IDENTITY_CONFIG).config) | {"max_batch_size": max_batch_size})


def reason(repository: ModelRepository, name: str = "m") -> str:
    (row,) = (row for row in repository.index() if row.name == name)
    assert row.state.value == "READY"
    return row.reason


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    write_model(tmp_path / "models", "m")
    return {"override_directory": tmp_path / "kept", "load_models": ("m",)}


async def test_an_override_is_used_again_after_a_restart(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3), persists=True)
        assert reason(repository) == "overridden, also after a restart: max_batch_size: 8 -> 3"
    for mode in ControlMode:
        given = options if mode is ControlMode.EXPLICIT else options | {"load_models": ()}
        async with open_repository(tmp_path / "models", **given, control_mode=mode) as repository:
            assert repository.get("m", None).config.max_batch_size == 3
            assert "max_batch_size: 8 -> 3" in reason(repository)
            await infer(repository, "m")


async def test_the_files_are_kept_too_and_need_no_model_on_disk(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("fresh", config_json=config(3), files={"5/weights": b"kept"}, persists=True)
    async with open_repository(tmp_path / "models", **options | {"load_models": ()}) as repository:
        assert repository.ready_versions("fresh") == (5,)
        directory = repository._lifecycles["fresh"].loaded[5].definition.versions[5]
        assert (directory / "weights").read_bytes() == b"kept"
        assert "all files: 1 in place of the directory" in reason(repository, "fresh")
        assert "m" not in repository._lifecycles, "nothing asks for it"


@pytest.mark.parametrize("persists", [None, True])
async def test_a_plain_load_keeps_the_override_until_the_files_change(
    tmp_path: Path, options: dict[str, Any], persists: bool | None
) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3), persists=persists)
        model, told = repository.get("m", None), reason(repository)
        await repository.load("m")
        assert repository.get("m", None) is model
        assert reason(repository) == told
        (tmp_path / "models" / "m" / "config.pbtxt").touch()
        await repository.load("m")
        assert repository.get("m", None).config.max_batch_size == 8
        assert reason(repository) == ("a stored override takes effect at the next start" if persists else "")
        await repository.load("m", config_json=config(3))
        write_model(tmp_path / "models", "m", versions=(2,))
        await repository.load("m")
        assert repository.get("m", None).config.max_batch_size == 8
    async with open_repository(tmp_path / "models", **options) as repository:
        assert repository.get("m", None).config.max_batch_size == (3 if persists else 8)


async def test_an_unload_ends_an_override(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3))
        await repository.unload("m")
        await repository.load("m")
        assert repository.get("m", None).config.max_batch_size == 8


async def test_files_and_single_versions_of_an_override_go_with_a_plain_load(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        for replaced in ({"files": {"1/weights": b""}}, {"version": 1}):
            await repository.load("m", config_json=config(3), **replaced)
            await repository.load("m")
            assert repository.get("m", None).config.max_batch_size == 8


@pytest.mark.parametrize("override", [None, config(5)])
async def test_it_is_forgotten_on_request(tmp_path: Path, options: dict[str, Any], override: str | None) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3), persists=True)
        await repository.load("m", config_json=override, persists=False)
        assert repository.get("m", None).config.max_batch_size == (5 if override else 8)
        assert reason(repository) == ""
    async with open_repository(tmp_path / "models", **options) as repository:
        assert repository.get("m", None).config.max_batch_size == 8


async def test_an_override_that_does_not_load_is_not_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3), persists=True)
        with pytest.raises(InvalidArgumentError):
            await repository.load("m", config_json=config(-1), persists=True)
    async with open_repository(tmp_path / "models", **options) as repository:
        assert repository.get("m", None).config.max_batch_size == 3


async def test_one_that_is_not_to_be_kept_is_lost(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3))
        assert reason(repository) == ""
    async with open_repository(tmp_path / "models", **options) as repository:
        assert repository.get("m", None).config.max_batch_size == 8


async def test_a_damaged_one_fails_the_load_and_says_what_to_do(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3), persists=True)
    (tmp_path / "kept" / "models" / "m.json").write_text("{}")
    async with open_repository(tmp_path / "models", **options) as repository:
        (row,) = repository.index()
        assert row.state.value == "UNAVAILABLE"
        assert "is damaged" in row.reason
        await repository.load("m", persists=False)
        assert reason(repository) == ""


async def test_a_change_on_disk_keeps_the_override_when_polling(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=config(3), persists=True)
    given = options | {"load_models": (), "control_mode": ControlMode.POLL}
    async with open_repository(tmp_path / "models", **given) as repository:
        write_model(tmp_path / "models", "m", versions=(2,))
        for _ in range(2):
            await repository._poller.poll_once()
            await repository._poller.wait_idle()
        model = repository.get("m", None)
        assert (model.version, model.config.max_batch_size) == (2, 3)


async def test_what_an_override_changes_is_logged(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        with caplog.at_level(logging.INFO):
            await repository.load("m", config_json=config(2))
    assert "model 'm': the override changes max_batch_size: 8 -> 2" in caplog.messages


async def test_the_index_tells_the_first_changes_of_many(tmp_path: Path, options: dict[str, Any]) -> None:
    many = json.loads(config(8)) | {"parameters": {f"p{number}": {"string_value": "v"} for number in range(20)}}
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.load("m", config_json=json.dumps(many), persists=True)
        assert reason(repository).count("->") == 10
        assert reason(repository).endswith("; ...")


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ({"persists": True}, "there is no override to keep"),
        ({"persists": True, "config_json": "{}", "version": 1}, "not for one"),
        ({"persists": False, "version": 1}, "not for one"),
    ],
)
async def test_what_cannot_be_kept(
    tmp_path: Path, options: dict[str, Any], details: dict[str, Any], words: str
) -> None:
    async with open_repository(tmp_path / "models", **options) as repository:
        with pytest.raises(InvalidArgumentError, match=words):
            await repository.load("m", **details)


async def test_without_a_directory_nothing_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_repository(tmp_path / "models", load_models=("m",)) as repository:
        with pytest.raises(InvalidArgumentError, match="--override-directory"):
            await repository.load("m", config_json=config(3), persists=True)
        await repository.load("m", persists=False)
