"""The layout of one model's files, read from its directory without opening any file.

    <model>/config.pbtxt | configs/<config name>.pbtxt | <version>/<files>

Symbolic links are followed; hidden entries do not belong to a model; nothing is ever written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelserver.config.schema import ModelVersionPolicy
from modelserver.repository.cloud_root import CloudRoot, fingerprint_listing, versions_of
from modelserver.repository.fingerprint import (
    ModelFingerprint,
    TreeFingerprint,
    fingerprint_file,
    fingerprint_tree,
    is_ignored,
)
from modelserver.repository.namespaces import key_of
from modelserver.store.cloud_store import Listing

CONFIG_FILENAME = "config.pbtxt"
CONFIGS_DIRECTORY = "configs"
# A file of this name in a model's directory blocks every load until it is removed.
INCOMPLETE_MARKER = ".incomplete"

_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")
_VERSION_WITH_ZEROS = re.compile(r"0[0-9]+")


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """One model's directory. `config_file` is None if it does not exist: the backend may complete everything.

    `key` distinguishes models of the same name; `repository` and `namespace` are name and path of its root. `remote`
    is the listing of a model in an object store, whose directory does not exist before it is copied; the `origin`
    of a copy is its source.
    `ignored` are directories that look like versions but are not, with the reason. `is_single` marks a
    model whose name was given from outside, not by its directory. `file` is the name of the model's only file, if the
    rest of the directory does not belong to it.
    """

    name: str
    directory: Path
    config_file: Path | None
    versions: Mapping[int, Path]
    is_incomplete: bool = False
    is_single: bool = False
    file: str = ""
    ignored: tuple[IgnoredPath, ...] = ()
    repository: str = ""
    namespace: str = ""
    remote: RemoteModel | None = None
    origin: str = ""

    @property
    def key(self) -> str:
        return key_of(self.repository, self.name) if self.namespace else self.name


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model in an object store as listed."""

    root: CloudRoot
    listing: Listing


@dataclass(frozen=True, slots=True)
class IgnoredPath:
    """An entry of a repository that is not served, and the reason. The kind of an unreadable entry is unknown."""

    path: Path
    reason: str
    is_unreadable: bool = False
    key: str = ""


def remote_layout(root: CloudRoot, name: str, listing: Listing, config_name: str) -> ModelLayout:
    """The layout of a model that is not copied yet."""
    directory = Path(f"{root.text}/{name}")
    configs = [f"{CONFIGS_DIRECTORY}/{config_name}.pbtxt"] if config_name else []
    config = next((path for path in (*configs, CONFIG_FILENAME) if path in listing.files), None)
    return ModelLayout(
        name=name,
        directory=directory,
        config_file=directory / config if config is not None else None,
        versions={version: directory / str(version) for version in versions_of(listing)},
        is_incomplete=INCOMPLETE_MARKER in listing.files,
        remote=RemoteModel(root, listing),
    )


def scan_model(directory: Path, name: str, *, config_name: str = "") -> ModelLayout:
    """The layout of one model's directory, even if it is incomplete. Raises OSError when it cannot be read."""
    versions: dict[int, Path] = {}
    ignored: list[IgnoredPath] = []
    for entry in subdirectories(directory):
        if _VERSION.fullmatch(entry):
            versions[int(entry)] = directory / entry
        elif _VERSION_WITH_ZEROS.fullmatch(entry):
            reason = (
                f"ignore version directory '{entry}' which contains leading zeros in its directory name: name it "
                f"'{int(entry)}'"
            )
            ignored.append(IgnoredPath(directory / entry, reason))
    return ModelLayout(
        name=name,
        directory=directory,
        config_file=_config_file(directory, config_name),
        versions=dict(sorted(versions.items())),
        is_incomplete=(directory / INCOMPLETE_MARKER).exists(),
        ignored=tuple(ignored),
    )


def fingerprint_model(layout: ModelLayout) -> ModelFingerprint:
    """The state of a model's files. Raises OSError when a directory cannot be read."""
    if layout.remote is not None:
        return fingerprint_listing(layout.remote.listing)
    if layout.file:
        return ModelFingerprint(
            layout.directory, TreeFingerprint(), {1: fingerprint_file(layout.directory / layout.file)}
        )
    versions = {version: fingerprint_tree(path) for version, path in layout.versions.items()}
    if layout.directory in layout.versions.values():  # a lone model file: the directory is the version
        return ModelFingerprint(layout.directory, TreeFingerprint(), versions)
    skip = {path.name for path in layout.versions.values()}
    return ModelFingerprint(layout.directory, fingerprint_tree(layout.directory, skip=skip), versions)


def subdirectories(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if not is_ignored(entry.name) and _is_directory(entry))


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link, or a directory that we may not read
        return False


def looks_like_model(directory: Path) -> bool:
    """Raises OSError when that cannot be determined."""
    if _config_file(directory, "") is not None or (directory / CONFIGS_DIRECTORY).is_dir():
        return True
    if (directory / INCOMPLETE_MARKER).exists():
        return True
    return any(_VERSION.fullmatch(name) for name in subdirectories(directory))


def _config_file(directory: Path, config_name: str) -> Path | None:
    candidates = [directory / CONFIGS_DIRECTORY / f"{config_name}.pbtxt"] if config_name else []
    candidates.append(directory / CONFIG_FILENAME)
    return next((path for path in candidates if path.is_file()), None)


def is_version(name: str) -> bool:
    """Whether a directory of that name in a model's is a version."""
    return _VERSION.fullmatch(name) is not None


def served_versions(policy: ModelVersionPolicy | None, available: Sequence[int]) -> tuple[int, ...]:
    """The versions of `available` to serve, ascending; no policy means the highest one.

    Versions that the policy names but that do not exist are left out: see `missing_versions`.
    """
    ascending = sorted(set(available))
    if policy is not None and policy.all is not None:
        return tuple(ascending)
    if policy is not None and policy.specific is not None:
        wanted = frozenset(policy.specific.versions)
        return tuple(version for version in ascending if version in wanted)
    latest = policy.latest if policy is not None else None
    num_versions = max(1, latest.num_versions) if latest is not None else 1
    return tuple(ascending[-num_versions:])


def missing_versions(policy: ModelVersionPolicy | None, available: Sequence[int]) -> tuple[int, ...]:
    """The versions that a `specific` policy names but that do not exist, ascending."""
    if policy is None or policy.specific is None:
        return ()
    return tuple(sorted(set(policy.specific.versions) - set(available)))
