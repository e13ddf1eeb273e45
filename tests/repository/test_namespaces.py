"""Models of the same name in several repositories, each in a namespace of its own."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.repositories import GatedLoader, infer, open_repository, write_model

from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from modelserver.repository.namespaces import AmbiguousModelError, Namespaces, repository_names
from modelserver.repository.options import ControlMode
from modelserver.repository.repository import ModelRepository

OVERRIDE = (
    '{"backend": "identity", "max_batch_size": 2, '
    '"input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}], '
    '"output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}]}'
)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    for root, names in (("one", ("both", "mine")), ("two", ("both", "yours"))):
        for name in names:
            write_model(tmp_path / root, name, versions=(1, 2))
    return tmp_path / "one", tmp_path / "two"


@pytest.fixture
async def repository(roots: tuple[Path, Path]) -> AsyncIterator[ModelRepository]:
    async with open_repository(*roots, has_namespaces=True, load_models=("*",)) as repository:
        yield repository


def shown(repository: ModelRepository, name: str = "") -> list[tuple[str, str, int | None, str]]:
    return [(row.repository, row.name, row.version, row.state.value) for row in repository.index(name)]


async def test_all_are_loaded_and_the_index_says_where_they_are(repository: ModelRepository) -> None:
    assert shown(repository) == [
        ("one", "both", 2, "READY"),
        ("one", "mine", 2, "READY"),
        ("two", "both", 2, "READY"),
        ("two", "yours", 2, "READY"),
    ]
    assert shown(repository, "two") == [("two", "both", 2, "READY"), ("two", "yours", 2, "READY")]
    with pytest.raises(NotFoundError, match="no model repository 'three'; there are: one, two"):
        repository.index("three")
    assert repository.is_ready(strict=True)


async def test_a_name_that_is_unambiguous_is_enough(repository: ModelRepository, roots: tuple[Path, Path]) -> None:
    assert repository.get("mine", None) is repository.get("one::mine", 2)
    assert repository.ready_versions("mine") == repository.ready_versions("one::mine") == (2,)
    assert (repository.get("mine", None).name, repository.get("mine", None).namespace) == ("mine", str(roots[0]))
    await infer(repository, "mine")


async def test_one_that_is_not_says_so_in_tritons_words(repository: ModelRepository) -> None:
    with pytest.raises(AmbiguousModelError) as ambiguous:
        repository.get("both", None)
    assert ambiguous.value.message.startswith(
        "There are 2 identifiers of model 'both' in global map, model namespace must be provided to resolve ambiguity."
    )
    assert "one::both, two::both" in ambiguous.value.message
    assert repository.ready_versions("both") == ()
    models = [repository.get(f"{root}::both", None) for root in ("one", "two")]
    assert models[0] is not models[1]


async def test_an_unknown_name_is_not_found(repository: ModelRepository) -> None:
    for name in ("other", "one::yours", "three::both"):
        with pytest.raises(NotFoundError):
            repository.get(name, None)


async def test_unloading_one_leaves_the_other_alone_under_the_name(repository: ModelRepository) -> None:
    await repository.unload("both", repository="one")
    assert repository.get("both", None) is repository.get("two::both", None)
    with pytest.raises(UnavailableError, match="no available versions"):
        repository.get("one::both", None)
    await repository.load("one::both")
    with pytest.raises(AmbiguousModelError):
        repository.get("both", None)


async def test_without_a_repository_all_of_the_name_are_meant(repository: ModelRepository) -> None:
    before = [repository.get(f"{root}::both", None) for root in ("one", "two")]
    await repository.unload("both")
    with pytest.raises(AmbiguousModelError):
        repository.get("both", None)
    await repository.load("both", version=1)
    for root, old in zip(("one", "two"), before, strict=True):
        assert repository.get(f"{root}::both", None).version == 1
        assert repository.get(f"{root}::both", None) is not old


async def test_a_model_that_fails_is_meant_too(roots: tuple[Path, Path]) -> None:
    """Else its requests would be answered by another model of the name."""
    (roots[0] / "both" / "config.pbtxt").write_text("nonsense")
    async with open_repository(*roots, has_namespaces=True, control_mode=ControlMode.NONE) as repository:
        with pytest.raises(AmbiguousModelError):
            repository.get("both", None)
        await infer(repository, "two::both")


async def test_a_reload_that_fails_leaves_the_name_ambiguous(roots: tuple[Path, Path]) -> None:
    loader = GatedLoader()
    options: dict[str, Any] = {"has_namespaces": True, "load_models": ("two::both",), "loader": loader}
    async with open_repository(*roots, **options) as repository:
        await infer(repository, "both")
        (roots[0] / "both" / "config.pbtxt").write_text("nonsense")
        with pytest.raises(InvalidArgumentError):
            await repository.load("one::both")
        with pytest.raises(AmbiguousModelError):
            repository.get("both", None)


async def test_models_to_load_at_start_by_name_or_key(roots: tuple[Path, Path]) -> None:
    for names, loaded in ((("both",), {"one", "two"}), (("two::both",), {"two"})):
        async with open_repository(*roots, has_namespaces=True, load_models=names) as repository:
            assert {row[0] for row in shown(repository) if row[3] == "READY"} == loaded
    async with open_repository(*roots, has_namespaces=True, load_models=("nobody",)) as repository:
        assert ("", "nobody", None, "UNAVAILABLE") in shown(repository)


async def test_overrides_are_of_one_repository_if_files_come_along(repository: ModelRepository) -> None:
    with pytest.raises(
        InvalidArgumentError, match="choose the repository for its files by 'repository' or '<repository>::both'"
    ):
        await repository.load("both", config_json=OVERRIDE, files={"1/w": b""})
    await repository.load("both", config_json=OVERRIDE, repository="two", files={"1/w": b""})
    sizes = [repository.get(f"{root}::both", None).config.max_batch_size for root in ("one", "two")]
    assert sizes == [8, 2]
    await repository.load("fresh", config_json=OVERRIDE, repository="one", files={"1/w": b""})
    await infer(repository, "fresh")


async def test_kept_overrides_are_of_one_repository(roots: tuple[Path, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"has_namespaces": True, "override_directory": tmp_path / "kept"}
    async with open_repository(*roots, **options) as repository:
        await repository.load("two::both", config_json=OVERRIDE, persists=True)
    async with open_repository(*roots, **options, load_models=("both",)) as repository:
        sizes = [repository.get(f"{root}::both", None).config.max_batch_size for root in ("one", "two")]
        assert sizes == [8, 2]


async def test_polling_follows_each(roots: tuple[Path, Path]) -> None:
    async with open_repository(*roots, has_namespaces=True, control_mode=ControlMode.POLL) as repository:
        write_model(roots[1], "both", versions=(3,))
        for _ in range(2):
            await repository._poller.poll_once()
            await repository._poller.wait_idle()
        assert [repository.get(f"{root}::both", None).version for root in ("one", "two")] == [2, 3]


async def test_repositories_come_and_go(repository: ModelRepository, roots: tuple[Path, Path]) -> None:
    for root in ("one", "two"):
        await repository.load("both", repository=root)
    await repository.unregister(str(roots[0]))
    assert {row[0] for row in shown(repository)} == {"two"}
    await infer(repository, "both")
    assert repository.get("both", None) is repository.get("two::both", None)
    with pytest.raises(NotFoundError, match="no model repository 'one'"):
        await repository.load("both", repository="one")
    other = roots[0].parent / "other" / "two"
    write_model(other, "both", versions=(7,))
    await repository.register(str(other))
    await repository.load("both", repository="two-2")
    assert repository.get("two-2::both", None).version == 7
    with pytest.raises(AmbiguousModelError):
        repository.get("both", None)
    await repository.register(str(roots[0]))
    await repository.load("one::both")
    assert repository.get("one::both", None).version != 7


async def test_names_that_look_like_keys_are_left_out(roots: tuple[Path, Path], caplog: Any) -> None:
    write_model(roots[0], "two::both")
    async with open_repository(*roots, has_namespaces=True, load_models=("*",)) as repository:
        assert ("two", "both", 2, "READY") in shown(repository)
        assert len(shown(repository)) == 4
    assert "must not contain '::'" in caplog.text


async def test_without_namespaces_repositories_cannot_be_named(roots: tuple[Path, Path]) -> None:
    async with open_repository(*roots) as repository:
        for operation in (repository.load("mine", repository="one"), repository.unload("mine", repository="one")):
            with pytest.raises(UnsupportedError, match="'one': naming one repository is not supported without"):
                await operation
        assert {row.name for row in repository.index("one")} == {"both", "mine"}


async def test_operations_of_one_name_run_side_by_side(roots: tuple[Path, Path]) -> None:
    loader = GatedLoader()
    async with open_repository(*roots, has_namespaces=True, loader=loader) as repository:
        loader.hold("both")
        loading = asyncio.create_task(repository.load("both"))
        await loader.reached("both")
        loader.release("both")
        await loading
        assert len(loader.loaded) == 2


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("/a/models", "/b/others"), ("models", "others")),
        (("/a/models", "/b/models", "/c/models"), ("models", "models-2", "models-3")),
        (("/a/x::y",), ("x_y",)),
    ],
)
def test_repositories_are_named_by_their_paths(paths: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert repository_names([Path(path) for path in paths]) == names


def test_keys_are_split_at_repositories_only() -> None:
    on, off = Namespaces(["one"], is_on=True), Namespaces(["one"])
    assert (on.split("one::m"), on.split("two::m"), on.split("m")) == (("one", "m"), ("", "two::m"), ("", "m"))
    assert off.split("one::m") == ("", "one::m")
    assert on.keys("m", ["one::m", "one::n"]) == ["one::m"]
    assert off.keys("m", ["m", "n"]) == ["m"]
