"""Models loaded at run time from directories outside the repositories, and unloaded as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from modelserver.backend.model_files import backend_for_model_files
from modelserver.config.pbtxt import read_pbtxt
from modelserver.config.schema import EnsembleStep, ModelConfig
from modelserver.errors import AlreadyExistsError, ConfigError, InvalidArgumentError, NotFoundError, UnavailableError
from modelserver.repository.catalog import Catalog
from modelserver.repository.layout import CONFIG_FILENAME, looks_like_model, subdirectories
from modelserver.repository.lifecycle import ModelLifecycle
from modelserver.repository.load_request import LoadRequest
from modelserver.repository.mounts import Mounts
from modelserver.repository.roots import BackendFinder, RepositoryRoot, resolve_root
from modelserver.repository.table import ModelTable


@dataclass(slots=True, eq=False)
class _Archive:
    """`root` is the directory's repository, once known; `is_up`: it is neither being loaded nor unloaded."""

    directory: Path
    root: RepositoryRoot | None = None
    is_up: bool = False


class Archives:
    """Each archive is a repository of its own as long as it is loaded. Event loop thread only.

    `lifecycle_of` makes the lifecycle of a model that has none.
    """

    def __init__(
        self,
        catalog: Catalog,
        mounts: Mounts,
        table: ModelTable,
        scan_pool: Executor,
        lifecycle_of: Callable[[str], ModelLifecycle],
    ) -> None:
        self._catalog = catalog
        self._mounts = mounts
        self._table = table
        self._scan_pool = scan_pool
        self._lifecycle_of = lifecycle_of
        self._archives: dict[str, _Archive] = {}

    @property
    def directories(self) -> Mapping[str, Path]:
        """The source directory of each loaded archive, by name."""
        return {name: archive.directory for name, archive in sorted(self._archives.items()) if archive.is_up}

    async def add(self, name: str, directory: Path) -> None:
        """Load the model, or the ensemble with its models; returns when it serves. A failure leaves nothing behind.

        Raises AlreadyExistsError for names that are in use, and as `archive_root` and loads do.
        """
        repositories = self._table.namespaces.repositories
        if name in {*self._archives, *self._catalog.scan.names, *self._table.lifecycles, *repositories}:
            raise AlreadyExistsError(f"a model or repository '{name}' already exists")
        archive = self._archives[name] = _Archive(directory)
        try:
            archive.root = await self._open(name, directory)
            await self._mounts.add([archive.root])
            for key in self._mounts.keys([archive.root]):
                if key in self._catalog.scan.duplicates or key in self._table.lifecycles:
                    raise AlreadyExistsError(f"'{directory}' contains a model '{key}', which already exists")
            await asyncio.shield(self._lifecycle_of(archive.root.key_of(name)).load(LoadRequest()))
            archive.is_up = True
        finally:
            if not archive.is_up:
                await self._drop(name, archive)

    async def remove(self, name: str) -> None:
        """Unload the models of an archive; returns when their requests are answered and everything is closed.

        Raises NotFoundError for a name that was not added, UnavailableError while it is being loaded or unloaded.
        """
        archive = self._archives.get(name)
        if archive is None:
            raise NotFoundError(f"there is no model '{name:.200}'")
        if not archive.is_up:
            raise UnavailableError(f"model '{name}' is being loaded or unloaded")
        archive.is_up = False
        await self._drop(name, archive)

    async def _open(self, name: str, directory: Path) -> RepositoryRoot:
        loop = asyncio.get_running_loop()
        root = await loop.run_in_executor(
            self._scan_pool, lambda: archive_root(directory, name, find_backend=backend_for_model_files)
        )
        return replace(root, is_namespace=self._table.namespaces.is_on)

    async def _drop(self, name: str, archive: _Archive) -> None:
        try:
            if archive.root is not None:
                await self._mounts.remove([archive.root])
        finally:
            del self._archives[name]


def archive_root(directory: Path, name: str, *, find_backend: BackendFinder) -> RepositoryRoot:
    """The root that `directory` is as a repository of its own, in which the model, or the ensemble, is called `name`.

    Blocking. Raises NotFoundError if the path is not a directory, InvalidArgumentError if it holds no model,
    or several models without one ensemble that uses them.
    """
    root = resolve_root(directory, name, find_backend)
    if root.model_name is not None:
        return replace(root, name=name)
    found = [entry for entry in subdirectories(directory) if looks_like_model(directory / entry)]
    if not found:
        raise InvalidArgumentError(
            f"there is no model in '{directory}': expected a {CONFIG_FILENAME}, or a directory with one"
        )
    if len(found) == 1:
        return RepositoryRoot(directory / found[0], name, name=name)
    return RepositoryRoot(directory, name=name, aliases={_ensemble(directory, found): name})


def _ensemble(directory: Path, models: list[str]) -> str:
    """The directory of the one ensemble that is not a step of another."""
    configs = {model: _config(directory / model / CONFIG_FILENAME) for model in models}
    ensembles = [model for model, config in configs.items() if config.is_ensemble]
    steps = {step.model_name for model in ensembles for step in _steps(configs[model])}
    top = [model for model in ensembles if model not in steps]
    if len(top) != 1:
        raise InvalidArgumentError(
            f"'{directory}' holds several models ({', '.join(models)}): expected one ensemble to be asked for them, "
            f"found {len(top)}"
        )
    return top[0]


def _config(path: Path) -> ModelConfig:
    """A config as far as it can be read; empty if it cannot be read, because its load then reports why."""
    try:
        return read_pbtxt(path.read_text(encoding="utf-8"), str(path)).config
    except (OSError, UnicodeDecodeError, ConfigError):
        return ModelConfig()


def _steps(config: ModelConfig) -> tuple[EnsembleStep, ...]:
    return config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
