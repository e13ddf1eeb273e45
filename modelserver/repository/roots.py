"""The roots given by `--model-repository` (directories and addresses), and their models.

    <root>/<model>/...   see `layout`

A root may also *be* one model: a model's file, or a directory that holds a config, a version, or a lone model file.
Hidden entries are never models; nothing is ever written.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from modelserver.backend.model_files import (
    backend_for_model_file,
    backend_for_model_files,
    checkpoint_of,
    is_foreign_model,
)
from modelserver.config.modelfile import is_modelfile, name_of_modelfile
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from modelserver.repository.cloud_cache import CloudCache
from modelserver.repository.cloud_root import CloudRoot
from modelserver.repository.layout import (
    CONFIG_FILENAME,
    IgnoredPath,
    ModelLayout,
    is_version,
    looks_like_model,
    remote_layout,
    scan_model,
    subdirectories,
)
from modelserver.repository.namespaces import SEPARATOR, check_model_name, key_of, name_problem, repository_names
from modelserver.repository.options import RepositoryOptions
from modelserver.repository.store_root import StoreRoot
from modelserver.store.cloud_store import CloudStore
from modelserver.store.cloud_uri import CloudUri, storage_options
from modelserver.store.store import Store

# Code alone does not make a model: a directory of it may be anything.
_CODE = ".py"
# Says which backend, if any, recognises a file in the directory as its model.
BackendFinder = Callable[[Path], str | None]


@dataclass(frozen=True, slots=True)
class RepositoryRoot:
    """A directory given by `--model-repository`; with `model_name` set it is that one model itself.

    With `file` set the model is that file of the directory, and nothing else in it.

    `name` is what clients call it; `is_namespace`: its models are told from others' by it. One with `cloud` lies in
    an object store, and its `path` is only what it is called. One with `store` shows a model store. `aliases` are
    names of models by their directories. `given` is the path or address by which the root was given.
    """

    path: Path
    model_name: str | None = None
    file: str = ""
    name: str = ""
    is_namespace: bool = False
    cloud: CloudRoot | None = None
    store: StoreRoot | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    given: Path | CloudUri | None = None

    @property
    def place(self) -> str:
        """The root's location, for people and for metrics."""
        if self.store is not None:
            return str(self.store.store.directory)
        return self.cloud.text if self.cloud is not None else str(self.path / self.file)

    def key_of(self, model_name: str) -> str:
        """The key of a model of this root: see `namespaces`."""
        return key_of(self.name, model_name) if self.is_namespace else model_name

    def name_of(self, key: str) -> str | None:
        """The name of the model with this key, if it may be of this root."""
        if not self.is_namespace:
            return key
        name = key.removeprefix(key_of(self.name, ""))
        return name if name != key else None

    def model_in(self, directory: str) -> str:
        """The name of the model in this directory of the root."""
        return self.aliases.get(directory, directory)

    def directory_of(self, name: str) -> str:
        """The directory in which the model of this name is, if there is one."""
        return next((directory for directory, alias in self.aliases.items() if alias == name), name)


@dataclass(frozen=True, slots=True)
class RepositoryScan:
    """The models of all roots, by key. A model found in several roots is in `duplicates` and not in `models`."""

    models: Mapping[str, ModelLayout] = field(default_factory=dict)
    duplicates: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    ignored: tuple[IgnoredPath, ...] = ()
    # The names of the roots that hold a model.
    repositories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*self.models, *self.duplicates)))

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Keys of possible models that cannot be read at the moment."""
        return tuple(ignored.key for ignored in self.ignored if ignored.is_unreadable)


def resolve_roots(
    paths: Sequence[Path], *, model_name: str = "", find_backend: BackendFinder
) -> tuple[RepositoryRoot, ...]:
    """Decide of each path whether it is a repository or a single model, which is then called `model_name`.

    It is a single model if it is a file, or if no directory in it looks like a model and it holds a config, a version,
    or a file that a backend recognises. A directory of model files of other names has a model for each. Raises
    NotFoundError if there is nothing at a path, InvalidArgumentError if it cannot be read, for a file of no known kind,
    for a directory of nothing else, and for an invalid or unused name.
    """
    roots = tuple(root for path in paths for root in _roots_at(path, model_name, find_backend))
    _check_is_used(model_name, roots)
    return roots


def _roots_at(path: Path, model_name: str, find_backend: BackendFinder) -> list[RepositoryRoot]:
    root = resolve_root(path, model_name, find_backend)
    if root.model_name is not None or any(_may_be_model(path / name) for name in subdirectories(path)):
        return [root]
    return _file_roots(path, model_name) or [root]


def _check_is_used(model_name: str, roots: Sequence[RepositoryRoot]) -> None:
    if model_name and not any(root.model_name for root in roots):
        places = ", ".join(root.place for root in roots)
        raise InvalidArgumentError(
            f"--model-name={model_name} is for the file or the directory of a single model; there is none in: {places}"
        )


def name_roots(
    roots: Sequence[RepositoryRoot], *, are_namespaces: bool, taken: Sequence[str] = ()
) -> tuple[RepositoryRoot, ...]:
    """The roots with the names that clients call them; with `are_namespaces` several may hold models of one name.

    `taken` are names that others have.
    """
    names = repository_names([root.path for root in roots], taken)
    return tuple(replace(root, name=name, is_namespace=are_namespaces) for root, name in zip(roots, names, strict=True))


def resolve_root(path: Path, model_name: str, find_backend: BackendFinder) -> RepositoryRoot:
    """As `resolve_roots`, for one path."""
    if path.is_file() and (checkpoint := checkpoint_of(path)) is not None:
        return resolve_root(checkpoint, model_name, find_backend)
    if path.is_file():
        backend_for_model_file(path)  # raises for a file of no known kind
        own_name = name_of_modelfile(path) if is_modelfile(path) else path.stem
        return RepositoryRoot(path.absolute().parent, _single_name(path, own_name, model_name), path.name)
    if not path.is_dir():
        raise _missing(path)
    try:
        names = subdirectories(path)
        if any(not is_version(name) and _may_be_model(path / name) for name in names):
            return RepositoryRoot(path)
        versions = [name for name in names if _is_version_directory(path / name)]
        if (path / CONFIG_FILENAME).is_file() or versions or find_backend(path) is not None:
            return RepositoryRoot(path, _single_name(path, path.absolute().name, model_name))
    except OSError as error:
        raise InvalidArgumentError(f"model repository '{path}' cannot be read: {error.strerror}") from error
    return RepositoryRoot(path)


def _file_roots(directory: Path, model_name: str) -> list[RepositoryRoot]:
    """A root for each model file of any name in a directory without models.

    Raises InvalidArgumentError if there are none, but files that could be meant to be.
    """
    files, problems = [], []
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix != _CODE:
            try:
                backend_for_model_file(path)
                files.append(path)
            except InvalidArgumentError as error:
                problems += [error.message] if is_foreign_model(path) else []
    if not files and problems:
        raise InvalidArgumentError("; ".join(problems))
    return [resolve_root(path, model_name if len(files) == 1 else "", backend_for_model_files) for path in files]


def _single_name(path: Path, own_name: str, model_name: str) -> str:
    name = model_name or own_name or "model"
    if not model_name and name_problem(name) is not None:
        raise InvalidArgumentError(
            f"'{path}' is a single model, but '{name}' cannot be its name ({name_problem(name)}): give one by "
            "--model-name"
        )
    check_model_name(name)
    return name


def scan_roots(roots: Sequence[RepositoryRoot], *, config_name: str, find_backend: BackendFinder) -> RepositoryScan:
    """All models of all roots. Raises OSError when a root cannot be read."""
    found: dict[str, list[ModelLayout]] = {}
    ignored: list[IgnoredPath] = []
    for root in roots:
        for layout in _scan_root(root, config_name, find_backend, ignored):
            layout = _placed(layout, root)
            found.setdefault(layout.key, []).append(layout)
    return RepositoryScan(
        models={name: layouts[0] for name, layouts in sorted(found.items()) if len(layouts) == 1},
        duplicates={
            name: tuple(layout.directory for layout in layouts)
            for name, layouts in sorted(found.items())
            if len(layouts) > 1
        },
        ignored=tuple(ignored),
        repositories={name: tuple(layout.repository for layout in layouts) for name, layouts in found.items()},
    )


def find_model(
    roots: Sequence[RepositoryRoot], key: str, *, config_name: str, find_backend: BackendFinder
) -> ModelLayout:
    """The layout of one model, by its key, without reading any other.

    The name has been checked. Raises NotFoundError when no root holds it, AlreadyExistsError when several do.
    """
    found = []
    for root in roots:
        name = root.name_of(key)
        if name is None:
            continue
        if root.model_name == name:
            found.append(_placed(_single_model(root, name, config_name, find_backend), root))
        elif root.cloud is not None:
            listing = root.cloud.refresh_model(name)
            if listing is not None:
                found.append(_placed(remote_layout(root.cloud, name, listing, config_name), root))
        elif root.model_name is None and (directory := root.path / root.directory_of(name)).is_dir():
            found.append(_placed(_scan_entry(root, directory, config_name), root))
    if not found:
        near = difflib.get_close_matches(key, _keys_in(roots), n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        places = ", ".join(root.place for root in roots)
        failed = f"failed to poll from model repository: '{key}': model not found in any model repository"
        raise NotFoundError(f"{failed} (looked in: {places}){hint}")
    if len(found) > 1:
        raise AlreadyExistsError(duplicate_reason(key, tuple(layout.directory for layout in found)))
    return found[0]


def duplicate_reason(name: str, directories: Sequence[Path]) -> str:
    """Why a model that is in several repositories is not loaded."""
    listed = ", ".join(str(directory) for directory in directories)
    return f"model appears in two or more repositories: none of '{name}' is loaded, as there are {listed}"


def _placed(layout: ModelLayout, root: RepositoryRoot) -> ModelLayout:
    return replace(layout, repository=root.name, namespace=root.place if root.is_namespace else "")


def _keys_in(roots: Sequence[RepositoryRoot]) -> list[str]:
    keys = [root.key_of(root.model_name) for root in roots if root.model_name is not None]
    for root in roots:
        if root.cloud is not None:
            keys += [root.key_of(name) for name in root.cloud.models]
        elif root.model_name is None:
            keys += [root.key_of(name) for name in subdirectories(root.path) if name_problem(name) is None]
    return keys


def _scan_root(
    root: RepositoryRoot, config_name: str, find_backend: BackendFinder, ignored: list[IgnoredPath]
) -> list[ModelLayout]:
    if root.cloud is not None:
        return [remote_layout(root.cloud, name, listing, config_name) for name, listing in root.cloud.models.items()]
    if root.model_name is not None:
        return [_single_model(root, root.model_name, config_name, find_backend)]
    layouts = []
    for name in subdirectories(root.path):
        directory = root.path / name
        problem = name_problem(name)
        if problem is None and root.is_namespace and SEPARATOR in name:
            problem = f"with --model-namespacing it must not contain '{SEPARATOR}'"
        if problem is not None:
            ignored.append(IgnoredPath(directory, f"not a model name: {problem}"))
            continue
        try:
            if looks_like_model(directory):
                layouts.append(_scan_entry(root, directory, config_name))
                ignored.extend(layouts[-1].ignored)
                continue
            reason = f"not a model: it holds neither {CONFIG_FILENAME} nor a version directory"
            ignored.append(IgnoredPath(directory, reason))
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
            ignored.append(IgnoredPath(directory, reason, is_unreadable=True, key=root.key_of(name)))
    return layouts


def _scan_entry(root: RepositoryRoot, directory: Path, config_name: str) -> ModelLayout:
    name = root.model_in(directory.name)
    layout = scan_model(directory, name, config_name=config_name)
    return replace(layout, is_single=True) if name != directory.name else layout


def _single_model(root: RepositoryRoot, name: str, config_name: str, find_backend: BackendFinder) -> ModelLayout:
    directory = root.path
    if root.file:
        versions = {1: directory} if (directory / root.file).is_file() else {}
        return ModelLayout(name, directory, None, versions, is_single=True, file=root.file)
    layout = replace(scan_model(directory, name, config_name=config_name), is_single=True)
    if not layout.versions and find_backend(directory) is not None:
        return replace(layout, versions={1: directory})
    return layout


def _may_be_model(directory: Path) -> bool:
    try:
        return looks_like_model(directory)
    except OSError:
        return False


def _is_version_directory(directory: Path) -> bool:
    """Whether a numeric directory in a root is a version, and not a model with a number for a name."""
    return is_version(directory.name) and not (directory / CONFIG_FILENAME).exists()


# Opens the roots of `--model-repository`; roots in object stores get credentials and a directory for copies.
# Triton's variables for the directory of each cloud's copies.
_VARIABLES = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def check_paths(options: RepositoryOptions) -> None:
    """Raises NotFoundError for the first path at which there is nothing: as `open_roots`, but before any work."""
    for path in options.roots:
        if isinstance(path, Path) and not path.exists():
            raise _missing(path)


def _missing(path: Path) -> NotFoundError:
    return NotFoundError(f"model repository '{path}' is not a directory: there is nothing at that path")


def open_roots(options: RepositoryOptions) -> tuple[RepositoryRoot, ...]:
    """The roots in the order of the options. Blocking; raises ServerError for one that cannot be used."""
    roots = [root for path in options.roots for root in _open(path, options)]
    _check_is_used(options.model_name, roots)
    if options.store is not None:
        view = StoreRoot(Store(options.store))
        roots.append(RepositoryRoot(view.path, store=view))
    return name_roots(roots, are_namespaces=options.has_namespaces)


def open_further_roots(
    place: Path | CloudUri, options: RepositoryOptions, aliases: Mapping[str, str]
) -> tuple[RepositoryRoot, ...]:
    """The roots at a place, for a running server; without names. `aliases` are names of models by their directories.

    Blocking. Raises InvalidArgumentError if there is nothing, for an alias that cannot be a name, and for one whose
    directory is not there; else as `open_roots`.
    """
    if isinstance(place, Path) and not place.exists():
        raise InvalidArgumentError(f"failed to register '{place}', repository not found")
    roots = _open(place, replace(options, model_name=""))
    for root in roots:
        if root.cloud is not None:
            root.cloud.refresh()
    if not aliases:
        return tuple(roots)
    (root, *others) = roots
    if others or root.model_name is not None or root.cloud is not None:
        raise InvalidArgumentError(f"'{root.place}': other names are for the directories of a local repository")
    for directory, name in aliases.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"directory '{directory}': a model's name is a text, got {name!r:.100}")
        check_model_name(name)
    names = subdirectories(root.path)
    if missing := [directory for directory in aliases if directory not in names]:
        raise InvalidArgumentError(f"'{root.place}' has no directory '{missing[0]:.200}' for a model of another name")
    called = [aliases.get(directory, directory) for directory in names]
    if twice := [name for name in aliases.values() if called.count(name) > 1]:
        raise AlreadyExistsError(
            f"failed to register '{twice[0]}', there is a conflicting mapping for '{twice[0]}': two directories of "
            f"'{root.place}' would have this name"
        )
    return (replace(root, aliases=aliases),)


def _open(path: Path | CloudUri, options: RepositoryOptions) -> list[RepositoryRoot]:
    if isinstance(path, Path):
        roots = _roots_at(path, options.model_name, backend_for_model_files)
    else:
        roots = [_open_cloud_root(path, options)]
    return [replace(root, given=path) for root in roots]


def _open_cloud_root(uri: CloudUri, options: RepositoryOptions) -> RepositoryRoot:
    """Raises UnavailableError when the library is missing, InvalidArgumentError for an unusable file or directory."""
    directory = options.cloud_cache_directory or _default_directory(uri)
    cache = CloudCache(directory, max_bytes=options.cloud_cache_bytes)
    store = CloudStore(uri, storage_options(uri, os.environ))
    return RepositoryRoot(Path(uri.text), cloud=CloudRoot(store, cache))


def _default_directory(uri: CloudUri) -> Path:
    given = os.environ.get(_VARIABLES.get(uri.scheme, ""), "")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "modelserver" / "cloud"
