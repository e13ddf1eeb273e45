"""Changes of models' traffic by operators: the checks, and the file that keeps it across restarts."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import orjson

from modelserver.errors import InternalError, InvalidArgumentError, NotFoundError
from modelserver.repository.catalog import Catalog
from modelserver.repository.loader import ModelLoader
from modelserver.repository.operations import RepositoryPools
from modelserver.repository.table import ModelTable
from modelserver.repository.traffic import Traffic, TrafficTable, parse_traffic
from modelserver.store.blobs import write_whole

logger = logging.getLogger(__name__)


class TrafficControl:
    """Made when the repository starts. Event loop thread only. `directory` is where traffic is stored, if set."""

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
        """Apply the stored traffic before the first request."""
        if self._store is not None:
            for name, traffic in (await self._pools.in_scan(self._store.read)).items():
                self._traffic.set(name, traffic)

    async def set(self, name: str, traffic: Traffic | None, *, persists: bool) -> None:
        """As `ModelRepository.set_traffic`."""
        if traffic is not None:
            await self._check(name, traffic)
        if persists and self._store is None:
            raise InvalidArgumentError(
                "'persist': start the server with --override-directory, which also stores traffic"
            )
        if self._store is not None and (persists or traffic is None):
            await self._pools.in_scan(self._store.save, name, traffic)
        self._traffic.set(name, traffic)
        logger.info("model '%s': traffic %s", name, "removed" if traffic is None else traffic.document)
        self._traffic.follow(name, self._table.ready_versions(name))

    async def _check(self, name: str, traffic: Traffic) -> None:
        """Raise for versions that could never answer. Versions that are not loaded yet are allowed."""
        keys = self._table.namespaces.keys(name, {*self._table.lifecycles, *self._catalog.scan.names})
        if not keys or self._table.namespaces.split(name)[0]:
            raise NotFoundError(
                f"model '{name:.200}' is not in the repository, so there are no versions to share requests"
            )
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


class TrafficStore:
    """By model name. Methods block and may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "traffic.json"
        self._lock = threading.Lock()  # guards the file

    def read(self) -> dict[str, Traffic]:
        """The stored traffic; unreadable entries are logged and left out."""
        with self._lock:
            try:
                documents = self._documents()
            except (OSError, ValueError) as error:
                logger.error("the traffic that was kept in %s cannot be read: %s", self._path, error)
                return {}
        kept = {}
        for name, document in documents.items():
            try:
                kept[name] = parse_traffic(document)
            except InvalidArgumentError as error:
                logger.error("the traffic of model '%s' that was kept is not used: %s", name, error.message)
        return kept

    def save(self, name: str, traffic: Traffic | None) -> None:
        """Replace the model's stored traffic; None deletes it. Raises InternalError."""
        with self._lock:
            try:
                documents = self._documents()
                if traffic is None and name not in documents:
                    return
                documents.pop(name, None)
                if traffic is not None:
                    documents[name] = traffic.document
                write_whole(self._path, orjson.dumps(documents, option=orjson.OPT_INDENT_2))
            except (OSError, ValueError) as error:
                raise InternalError(f"the traffic of model '{name}' cannot be kept in {self._path}: {error}") from error

    def _documents(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        documents = orjson.loads(self._path.read_bytes())
        if not isinstance(documents, dict) or not all(isinstance(each, dict) for each in documents.values()):
            raise ValueError("expected an object of objects")
        return documents
