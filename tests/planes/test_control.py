import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.repositories import IDENTITY_CONFIG, infer, open_repository, write_model

from modelserver.config.message import config_to_json
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from modelserver.planes.control import ControlPlane
from modelserver.repository.repository import ModelRepository

CONFIG = json.dumps(config_to_json(parse_pbtxt(IDENTITY_CONFIG).config))


@pytest.fixture
async def repository(tmp_path: Path) -> AsyncIterator[ModelRepository]:
    for name in ("a", "b"):
        write_model(tmp_path, name)
    async with open_repository(tmp_path, load_models=("a",)) as repository:
        yield repository


@pytest.fixture
def control(repository: ModelRepository) -> ControlPlane:
    return ControlPlane(repository)


async def test_index_lists_all_or_the_ready(control: ControlPlane) -> None:
    assert [(row.name, row.state.value) for row in control.index()] == [("a", "READY"), ("b", "UNKNOWN")]
    assert [row.name for row in control.index(ready_only=True)] == ["a"]


async def test_naming_a_repository_is_for_namespaces_but_in_the_index(control: ControlPlane, tmp_path: Path) -> None:
    assert [row.name for row in control.index(repository_name=tmp_path.name)] == ["a", "b"]
    with pytest.raises(NotFoundError, match="no model repository 'main'; there are: "):
        control.index(repository_name="main")
    for operation in (control.load("a", repository_name="main"), control.unload("a", repository_name="main")):
        with pytest.raises(UnsupportedError, match="'main'"):
            await operation


async def test_load_and_unload(control: ControlPlane, repository: ModelRepository) -> None:
    await control.load("b")
    await infer(repository, "b")
    await control.unload("b", {"unload_dependents": True})
    assert [row.name for row in control.index(ready_only=True)] == ["a"]


async def test_unloading_what_nobody_knows_is_no_error(control: ControlPlane) -> None:
    await control.unload("unknown")


async def test_loading_what_nobody_knows_is_not_found(control: ControlPlane) -> None:
    with pytest.raises(NotFoundError, match="looked in"):
        await control.load("unknown")


@pytest.mark.parametrize("content", [b"weights", base64.b64encode(b"weights").decode()])
async def test_config_and_files_replace_the_model(
    control: ControlPlane, repository: ModelRepository, content: bytes | str
) -> None:
    await control.load("a", {"config": CONFIG, "file:7/weights": content})
    assert repository.ready_versions("a") == (7,)
    (directory,) = {repository._lifecycles["a"].loaded[7].definition.versions[7]}
    assert (directory / "weights").read_bytes() == b"weights"


async def test_a_config_may_come_as_bytes(control: ControlPlane) -> None:
    await control.load("a", {"config": CONFIG.encode()})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"konfig": "{}"}, "unrecognized load parameter 'konfig': accepted are 'config', 'file:"),
        ({"config": 1}, "'config': expected a string of JSON, got an integer"),
        ({"config": b"\xff"}, "expected UTF-8"),
        ({"config": "{"}, "not valid JSON"),
        ({"config": CONFIG, "file:1/m": True}, "'file:1/m': expected the file's content, got a boolean"),
        ({"config": CONFIG, "file:1/m": "!"}, "expected base64"),
        ({"config": CONFIG, "file:../m": b""}, "invalid file override path"),
        ({"file:1/m": b""}, "need the parameter 'config'"),
    ],
)
async def test_load_parameters_are_checked(
    control: ControlPlane, parameters: dict[str, bool | int | str | bytes], words: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await control.load("a", parameters)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"config": "{}"},
            "unrecognized unload parameter 'config': accepted are 'evict', 'unload_dependents' and 'version'",
        ),
        ({"version": -1}, "expected the number of a version, got -1"),
        ({"version": "two"}, "expected the number of a version, got 'two'"),
        ({"version": True}, "expected the number of a version, got a boolean"),
        ({"version": 1, "unload_dependents": True}, "is about a whole model"),
        ({"unload_dependents": "yes"}, "expected a boolean, got a string"),
    ],
)
async def test_unload_parameters_are_checked(
    control: ControlPlane, parameters: dict[str, bool | int | str | bytes], words: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await control.unload("a", parameters)
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["", "../a", "a b"])
async def test_names_are_checked_in_any_mode(control: ControlPlane, name: str) -> None:
    for operation in (control.load(name), control.unload(name)):
        with pytest.raises(InvalidArgumentError, match=r"^(invalid model name|Model name cannot be empty\.)"):
            await operation


@pytest.mark.parametrize("version", [2, "2"])
async def test_a_version_may_be_a_parameter(
    control: ControlPlane, repository: ModelRepository, version: int | str, tmp_path: Path
) -> None:
    write_model(tmp_path, "a", versions=(1, 2))
    await control.load("a", {"version": version})
    assert repository.ready_versions("a") == (1, 2)
    await control.unload("a", {"version": version})
    assert repository.ready_versions("a") == (1,)


async def test_path_and_parameter_name_one_version(control: ControlPlane) -> None:
    await control.load("a", {"version": 1}, version=1)
    with pytest.raises(InvalidArgumentError, match="the path says version 1"):
        await control.load("a", {"version": 2}, version=1)
