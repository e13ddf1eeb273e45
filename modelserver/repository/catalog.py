"""The contents of the repository's directories at the last scan. Methods block briefly; one thread at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from modelserver.backend.model_files import backend_for_model_files
from modelserver.repository.cloud_root import CloudRoot
from modelserver.repository.fingerprint import ModelFingerprint
from modelserver.repository.layout import IgnoredPath, fingerprint_model
from modelserver.repository.roots import RepositoryRoot, RepositoryScan, scan_roots
from modelserver.repository.store_root import StoreChanges, StoreRoot
from modelserver.store.cloud_store import CloudUnavailableError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Survey:
    """A scan and the state of each model's files; None for a model that must not be changed."""

    scan: RepositoryScan
    fingerprints: dict[str, ModelFingerprint | None]


class Catalog:
    """Scans the roots on request and keeps the newest scan."""

    def __init__(self, roots: Sequence[RepositoryRoot], config_name: str) -> None:
        self.roots = tuple(roots)
        self.scan = RepositoryScan()
        self.listing: Future[None] | None = None
        self._config_name = config_name
        self._mtimes: tuple[int, ...] = ()
        self._mentioned: frozenset[IgnoredPath] = frozenset()

    @property
    def _stores(self) -> list[StoreRoot]:
        return [root.store for root in self.roots if root.store is not None]

    @property
    def _clouds(self) -> list[CloudRoot]:
        return [root.cloud for root in self.roots if root.cloud is not None]

    def survey(self) -> Survey:
        """Scan everything, files included. Raises OSError when a root cannot be read."""
        self.list_clouds()
        self._sync_stores()
        scan = self._scan()
        fingerprints: dict[str, ModelFingerprint | None] = dict.fromkeys((*scan.unreadable, *scan.duplicates))
        for name, layout in scan.models.items():
            try:
                fingerprints[name] = None if layout.is_incomplete else fingerprint_model(layout)
            except OSError as error:
                logger.warning("model '%s' cannot be read: %s", name, error)
                fingerprints[name] = None
        return Survey(scan, fingerprints)

    def list_clouds(self) -> None:
        """List the object stores again; everything else uses the last listing. Raises OSError."""
        for cloud in self._clouds:
            try:
                cloud.refresh()
            except CloudUnavailableError as error:
                raise OSError(error.message) from error

    def list_clouds_later(self, pool: Executor, max_age_s: float) -> None:
        """Let the next scan list the object stores again if the last one is older than `max_age_s`. Never blocks."""
        is_due = any(cloud.age_s > max_age_s for cloud in self._clouds)
        if is_due and (self.listing is None or self.listing.done()):
            self.listing = pool.submit(self._try_list_clouds)

    def _try_list_clouds(self) -> None:
        try:
            self.list_clouds()
        except OSError as error:
            logger.warning("%s", error)

    def refresh(self) -> None:
        """Update the list of models: one `stat` per root, or model of a store, if none was added or removed.

        Lists no object stores. A root that cannot be read leaves the list as it is.
        """
        try:
            self._sync_stores()
            if self._mtimes == self._read_mtimes() and not self.scan.ignored:
                return
            self._scan()
        except OSError as error:
            logger.warning("the model repository cannot be read: %s", error)

    def take_store_changes(self) -> StoreChanges:
        """The models of stores, by key, that have changed since this was called last."""
        found = StoreChanges()
        for root in self.roots:
            if root.store is not None:
                changes = root.store.take_changes()
                found.changed |= {root.key_of(name) for name in changes.changed}
                found.removed |= {root.key_of(name) for name in changes.removed}
                found.added |= {root.key_of(name) for name in changes.added}
        return found

    def _sync_stores(self) -> None:
        for store in self._stores:
            store.sync()

    def _scan(self) -> RepositoryScan:
        mtimes = self._read_mtimes()
        self.scan = scan_roots(self.roots, config_name=self._config_name, find_backend=backend_for_model_files)
        self._mtimes = mtimes
        self._mention(frozenset(self.scan.ignored))
        return self.scan

    def _mention(self, ignored: frozenset[IgnoredPath]) -> None:
        """Log each ignored path once, with the reason: operators must be able to see why a model is missing."""
        for path in sorted(ignored - self._mentioned, key=lambda path: path.path):
            logger.warning("left out: %s: %s", path.path, path.reason)
        self._mentioned = ignored

    def _read_mtimes(self) -> tuple[int, ...]:
        return tuple(
            root.cloud.generation if root.cloud is not None else root.path.stat().st_mtime_ns for root in self.roots
        )
