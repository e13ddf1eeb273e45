"""How operators change the traffic of models: what is checked, and what outlives the server."""

from __future__ import annotations

import logging
from pathlib import Path

from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.repository.catalog import Catalog
from modelserver.repository.loader import ModelLoader
from modelserver.repository.pools import RepositoryPools
from modelserver.repository.table import ModelTable
from modelserver.repository.traffic import Traffic, TrafficTable
from modelserver.repository.traffic_store import TrafficStore

logger = logging.getLogger(__name__)


class TrafficControl:
    """Made when the repository starts. Event loop thread only. `directory` is where traffic is kept, if anywhere."""

    def __init__(
        self,
        traffic: TrafficTable,
        table: ModelTable,
        catalog: Catalog,
        loader: ModelLoader,
        pools: RepositoryPools,
        directory: Path | None,
    ) -> None:
        self._traffic = traffic
        self._table = table
        self._catalog = catalog
        self._loader = loader
        self._pools = pools
        self._store = TrafficStore(directory) if directory is not None else None

    async def restore(self) -> None:
        """What was kept counts from the first request on."""
        if self._store is not None:
            for name, traffic in (await self._pools.in_scan(self._store.read)).items():
                self._traffic.set(name, traffic)

    async def set(self, name: str, traffic: Traffic | None, *, persists: bool) -> None:
        """As `ModelRepository.set_traffic`."""
        if traffic is not None:
            await self._check(name, traffic)
        if persists and self._store is None:
            raise InvalidArgumentError(
                "'persist': start the server with --override-directory, where traffic is kept as overrides are"
            )
        if self._store is not None and (persists or traffic is None):
            await self._pools.in_scan(self._store.save, name, traffic)
        self._traffic.set(name, traffic)
        logger.info("model '%s': traffic %s", name, "as ever" if traffic is None else traffic.document)
        self._traffic.follow(name, self._table.ready_versions(name))

    async def _check(self, name: str, traffic: Traffic) -> None:
        """Raise for versions that could never answer; those that are not loaded yet may."""
        keys = self._table.namespaces.keys(name, {*self._table.lifecycles, *self._catalog.scan.names})
        if not keys or self._table.namespaces.split(name)[0]:
            raise NotFoundError(f"there is no model '{name:.200}' whose requests could be shared by versions")
        found = {*self._table.ready_versions(name)}
        if traffic.versions <= found:
            return
        for key in keys:
            found |= await self._pools.in_scan(self._loader.versions, key)
        if absent := sorted(traffic.versions - found):
            raise InvalidArgumentError(
                f"traffic: model '{name}' has no version {', '.join(map(str, absent))}; there are: "
                f"{', '.join(map(str, sorted(found))) or 'none'}"
            )
