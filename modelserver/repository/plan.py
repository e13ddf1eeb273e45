"""The plan of a reload: a pure comparison of the loaded versions with the wanted ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from modelserver.config.schema import ModelDynamicBatching
from modelserver.execution.model import Model
from modelserver.repository.definition import ModelDefinition
from modelserver.repository.fingerprint import FileStamp, TreeFingerprint
from modelserver.repository.held_resource import HeldResource
from modelserver.repository.layout import CONFIG_FILENAME, CONFIGS_DIRECTORY


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """A version that serves or has served, and its resources on disk: see `LoadSource`.

    `definition` is the one it was loaded from, or the newer one under which it was kept. `leaving` says why it is still
    UNLOADING, once that has taken too long.
    """

    model: Model
    definition: ModelDefinition
    held: tuple[HeldResource, ...] = ()
    leaving: str = ""

    @property
    def version(self) -> int:
        return self.model.version

    @property
    def is_ready(self) -> bool:
        return self.model.is_ready()


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """Versions to `load` anew, to `keep` as they are, to `update` in place, and to `retire` for good.

    A version in `load` may already serve: its old model is retired when the new one is ready.
    """

    load: tuple[int, ...]
    keep: tuple[int, ...] = ()
    update: tuple[int, ...] = ()
    retire: tuple[int, ...] = ()


def plan_reload(
    loaded: Mapping[int, LoadedVersion], definition: ModelDefinition, *, keeps_others: bool = False
) -> ReloadPlan:
    """The minimal work to get from `loaded` to `definition`. A model that is not ready is never kept.

    `keeps_others`: the definition covers some versions only, and the others stay unchanged.
    """
    kinds = {version: _kind(loaded.get(version), definition, version) for version in definition.versions}
    return ReloadPlan(
        load=tuple(version for version, kind in kinds.items() if kind == "load"),
        keep=tuple(version for version, kind in kinds.items() if kind == "keep"),
        update=tuple(version for version, kind in kinds.items() if kind == "update"),
        retire=() if keeps_others else tuple(sorted(loaded.keys() - definition.versions.keys())),
    )


def _kind(loaded: LoadedVersion | None, new: ModelDefinition, version: int) -> str:
    if loaded is None or not loaded.is_ready or not _has_same_files(loaded.definition, new, version):
        return "load"
    old = loaded.definition
    if old.backend_class is not new.backend_class or old.backend_options != new.backend_options:
        return "load"
    if old.config == new.config:
        return "keep"
    # The version policy does not affect a version that is served.
    in_place = replace(old.config, version_policy=new.config.version_policy, instance_group=new.config.instance_group)
    if _can_follow(old.config.dynamic_batching, new.config.dynamic_batching):
        in_place = replace(in_place, dynamic_batching=new.config.dynamic_batching)
    return "update" if in_place == new.config else "load"


def _can_follow(old: ModelDynamicBatching | None, new: ModelDynamicBatching | None) -> bool:
    """Whether the batcher can change its rules while it runs: it exists, and requests in flight keep their order."""
    return old is not None and new is not None and old.preserve_ordering == new.preserve_ordering


def _has_same_files(old: ModelDefinition, new: ModelDefinition, version: int) -> bool:
    is_same_copy = old.origin != "" and old.origin == new.origin
    return (
        (is_same_copy or old.model_directory == new.model_directory)
        and (is_same_copy or old.versions[version] == new.versions[version])
        and old.fingerprint.versions[version] == new.fingerprint.versions[version]
        and _without_config(old.fingerprint.shared) == _without_config(new.fingerprint.shared)
    )


def _without_config(tree: TreeFingerprint) -> tuple[FileStamp, ...]:
    """The files shared by all versions, without the config, which is compared by its meaning."""
    prefix = f"{CONFIGS_DIRECTORY}/"
    return tuple(file for file in tree.files if file.path != CONFIG_FILENAME and not file.path.startswith(prefix))
