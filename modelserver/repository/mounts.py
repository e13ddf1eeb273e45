"""The roots of a running repository: those of the start, and those that come and go while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from modelserver.repository.catalog import Catalog
from modelserver.repository.loader import ModelLoader
from modelserver.repository.namespaces import Namespaces
from modelserver.repository.roots import RepositoryRoot
from modelserver.repository.table import ModelTable


class Mounts:
    """Adds roots and takes them away, with their models. Event loop thread only."""

    def __init__(self, catalog: Catalog, loader: ModelLoader, table: ModelTable, scan_pool: Executor) -> None:
        self._catalog = catalog
        self._loader = loader
        self._table = table
        self._scan_pool = scan_pool
        # Roots without new loads, whose models are being unloaded; their names are still in keys.
        self._leaving: list[RepositoryRoot] = []

    @property
    def roots(self) -> tuple[RepositoryRoot, ...]:
        return self._catalog.roots

    def keys(self, roots: Sequence[RepositoryRoot]) -> list[str]:
        """The models in these roots at the last scan."""
        names = {root.name for root in roots}
        return [key for key, found in self._catalog.scan.repositories.items() if names & set(found)]

    async def add(self, roots: Sequence[RepositoryRoot]) -> None:
        """Find the models of further roots; they are loaded only on request."""
        await self._set((*self._catalog.roots, *roots))

    async def remove(self, roots: Sequence[RepositoryRoot]) -> None:
        """Load no more models from these roots; return when those loaded from them have answered and are closed."""
        names = {root.name for root in roots}
        only_here = {key for key, found in self._catalog.scan.repositories.items() if names.issuperset(found)}
        keys = [key for key in self._table.lifecycles if key in only_here or self._is_from(key, roots)]
        kept = [root for root in self._catalog.roots if root.name not in names]
        self._leaving += roots
        try:
            await self._set(kept)
            await self._forget(keys)
        finally:
            self._leaving = [root for root in self._leaving if root.name not in names]
            self._name_roots()

    def _is_from(self, key: str, roots: Sequence[RepositoryRoot]) -> bool:
        """Whether the model that serves was loaded from these roots; another one may hold a model of its name too."""
        directories = {place for model in self._table.lifecycles[key].models for place in model.directories[1:]}
        return any({root.path, root.path.absolute()} & {place, place.parent} for root in roots for place in directories)

    async def _forget(self, keys: Sequence[str]) -> None:
        lifecycles = {key: self._table.lifecycles[key] for key in keys}
        await asyncio.gather(*(asyncio.shield(lifecycle.unload()) for lifecycle in lifecycles.values()))
        for key, lifecycle in lifecycles.items():
            await lifecycle.wait_idle()
            self._table.lifecycles.pop(key, None)

    async def _set(self, roots: Sequence[RepositoryRoot]) -> None:
        self._catalog.roots = self._loader.roots = tuple(roots)
        self._name_roots()
        await asyncio.get_running_loop().run_in_executor(self._scan_pool, self._catalog.refresh)

    def _name_roots(self) -> None:
        names = [root.name for root in (*self._catalog.roots, *self._leaving)]
        self._table.namespaces = Namespaces(names, is_on=self._table.namespaces.is_on)
