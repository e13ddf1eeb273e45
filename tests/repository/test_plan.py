from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.repositories import IDENTITY_CONFIG, write_model

from modelserver.repository.definition import ModelDefinition, read_definition
from modelserver.repository.layout import scan_model
from modelserver.repository.options import DefinitionOptions
from modelserver.repository.plan import LoadedVersion, ReloadPlan, plan_reload

ALL = "version_policy { all { } }"


@dataclass
class Serving:
    """As much of a model as the plan looks at."""

    version: int
    ready: bool = True

    def is_ready(self) -> bool:
        return self.ready


def read(directory: Path) -> ModelDefinition:
    return read_definition(scan_model(directory, directory.name), DefinitionOptions())


def serve(definition: ModelDefinition) -> dict[int, LoadedVersion]:
    return {version: LoadedVersion(Serving(version), definition) for version in definition.versions}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path, "m", versions=(1, 2), extra=ALL)


def test_everything_is_new_at_first(directory: Path) -> None:
    assert plan_reload({}, read(directory)) == ReloadPlan(load=(1, 2))


def test_nothing_changed(directory: Path) -> None:
    loaded = serve(read(directory))
    (directory / "config.pbtxt").write_text("# only a comment" + IDENTITY_CONFIG + ALL)
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(), keep=(1, 2))


def test_only_the_version_whose_files_changed_is_loaded(directory: Path) -> None:
    loaded = serve(read(directory))
    (directory / "2" / "weights").write_text("other weights")
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(2,), keep=(1,))


def test_versions_come_and_go(directory: Path) -> None:
    loaded = serve(read(directory))
    write_model(directory.parent, "m", versions=(3,), extra="version_policy { latest { num_versions: 2 } }")
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(3,), update=(2,), retire=(1,))


def test_instance_groups_change_in_place(directory: Path) -> None:
    loaded = serve(read(directory))
    write_model(directory.parent, "m", versions=(), extra=ALL + "instance_group [ { count: 3 } ]")
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(), update=(1, 2))


DELAY = "dynamic_batching { max_queue_delay_microseconds: %s }"


@pytest.mark.parametrize(
    "extra",
    [
        DELAY % 5,
        "dynamic_batching { preferred_batch_size: [ 2 ] }",
        "dynamic_batching { default_queue_policy { max_queue_size: 3 } }",
        "dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
        "dynamic_batching { } instance_group [ { count: 2 } ]",
    ],
)
def test_batching_changes_in_place(directory: Path, extra: str) -> None:
    write_model(directory.parent, "m", versions=(), extra=ALL + DELAY % 7)
    loaded = serve(read(directory))
    write_model(directory.parent, "m", versions=(), extra=ALL + extra)
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(), update=(1, 2))


@pytest.mark.parametrize("extra", ["", "dynamic_batching { preserve_ordering: true }"])
def test_what_a_batcher_cannot_follow_loads(directory: Path, extra: str) -> None:
    write_model(directory.parent, "m", versions=(), extra=ALL + DELAY % 7)
    loaded = serve(read(directory))
    write_model(directory.parent, "m", versions=(), extra=ALL + extra)
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(1, 2))


def test_a_definition_of_some_versions_leaves_the_others(directory: Path) -> None:
    loaded = serve(read(directory))
    only_first = read_definition(scan_model(directory, "m"), DefinitionOptions(), only_version=1)
    assert plan_reload(loaded, only_first, keeps_others=True) == ReloadPlan(load=(), keep=(1,))


@pytest.mark.parametrize("extra", ["dynamic_batching { }", 'parameters { key: "a" value { string_value: "b" } }'])
def test_any_other_change_of_the_config_loads(directory: Path, extra: str) -> None:
    loaded = serve(read(directory))
    write_model(directory.parent, "m", versions=(), extra=ALL + extra)
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(1, 2))


def test_a_shared_file_concerns_every_version(directory: Path) -> None:
    loaded = serve(read(directory))
    (directory / "labels.txt").write_text("a")
    assert plan_reload(loaded, read(directory)) == ReloadPlan(load=(1, 2))


def test_other_backend_options_load(directory: Path) -> None:
    definition = read(directory)
    changed = replace(definition, backend_options={"threads": "2"})
    assert plan_reload(serve(definition), changed) == ReloadPlan(load=(1, 2))


def test_a_model_that_is_not_ready_is_never_kept(directory: Path) -> None:
    definition = read(directory)
    loaded = serve(definition)
    loaded[1].model.ready = False
    assert plan_reload(loaded, definition) == ReloadPlan(load=(1,), keep=(2,))
