"""A model repository in an object store: its contents at the last listing, and local copies of its models."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from modelserver.repository.cloud_cache import CloudCache, CloudTree
from modelserver.repository.fingerprint import FileStamp, ModelFingerprint, TreeFingerprint, is_ignored
from modelserver.repository.namespaces import name_problem
from modelserver.store.cloud_store import CloudStore, Listing, RemoteFile

logger = logging.getLogger(__name__)

_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")


class CloudRoot:
    """Lists and copies; models are recognised as on disk. Methods, except properties, block; any thread."""

    def __init__(self, store: CloudStore, cache: CloudCache) -> None:
        self._store = store
        self._cache = cache
        self._lock = threading.Lock()  # guards the attributes below
        self._models: Mapping[str, Listing] = {}
        self._generation = 0
        self._listed_s = 0.0

    @property
    def text(self) -> str:
        """The address as the operator gave it."""
        return self._store.uri.text

    @property
    def models(self) -> Mapping[str, Listing]:
        """The files of each model at the last listing."""
        return self._models

    @property
    def generation(self) -> int:
        """A number that changes whenever the models or their files change."""
        return self._generation

    @property
    def age_s(self) -> float:
        """How long ago everything was listed."""
        return time.monotonic() - self._listed_s

    def refresh(self) -> None:
        """List everything. Raises CloudUnavailableError; the previous listing then stays."""
        listing = self._store.list()
        models = {
            name: part
            for name, part in sorted(_by_directory(listing).items())
            if not is_ignored(name) and name_problem(name) is None and _looks_like_model(part)
        }
        self._listed_s = time.monotonic()
        self._replace(lambda _: models)

    def refresh_model(self, name: str) -> Listing | None:
        """List one model; None if it is not there. Raises CloudUnavailableError."""
        listing = _visible(self._store.list(name))
        found = listing if _looks_like_model(listing) else None
        self._replace(lambda models: _with(models, name, found))
        return found

    def materialise(self, name: str, listing: Listing) -> CloudTree:
        """A local copy of a model as listed. Raises ServerError."""

        def fetch(path: str, file: RemoteFile, target: Path) -> None:
            self._store.fetch(f"{name}/{path}", file, target)

        return self._cache.materialise(self.text, name, listing, fetch)

    def _replace(self, change: Callable[[Mapping[str, Listing]], Mapping[str, Listing]]) -> None:
        with self._lock:
            models = change(self._models)
            if models != self._models:
                self._models = models
                self._generation += 1


def fingerprint_listing(listing: Listing) -> ModelFingerprint:
    """The state of a model's files according to the listing; no file is read."""
    stamps = [FileStamp(f"{path}/", 0, 0) for path in listing.directories]
    stamps += [FileStamp(path, file.size_bytes, _number(file.tag)) for path, file in listing.files.items()]
    return ModelFingerprint(shared=TreeFingerprint(tuple(sorted(stamps, key=lambda stamp: stamp.path))))


def versions_of(listing: Listing) -> tuple[int, ...]:
    """The versions of a model, ascending."""
    return tuple(sorted(int(path) for path in listing.directories if _VERSION.fullmatch(path)))


def _with(models: Mapping[str, Listing], name: str, found: Listing | None) -> Mapping[str, Listing]:
    """The models with this one as it is now: None if it is gone."""
    others = {other: part for other, part in models.items() if other != name}
    return dict(sorted({**others, name: found}.items())) if found is not None else others


def _number(tag: str) -> int:
    return int.from_bytes(hashlib.sha256(tag.encode()).digest()[:7])


def _looks_like_model(listing: Listing) -> bool:
    tops = {path for path in listing.files if "/" not in path}
    return (
        "config.pbtxt" in tops
        or ".incomplete" in tops
        or "configs" in listing.directories
        or bool(versions_of(listing))
    )


def _by_directory(listing: Listing) -> dict[str, Listing]:
    files: dict[str, dict[str, RemoteFile]] = {path: {} for path in listing.directories if "/" not in path}
    directories: dict[str, set[str]] = {name: set() for name in files}
    for path, file in listing.files.items():
        name, _, rest = path.partition("/")
        if rest:
            files.setdefault(name, {})[rest] = file
    for path in listing.directories:
        name, _, rest = path.partition("/")
        if rest:
            directories.setdefault(name, set()).add(rest)
    return {name: _visible(Listing(found, frozenset(directories.get(name, ())))) for name, found in files.items()}


def _visible(listing: Listing) -> Listing:
    """Without files that do not belong to a model; the marker of an incomplete model stays."""
    files = {path: file for path, file in listing.files.items() if path == ".incomplete" or not _is_hidden(path)}
    return Listing(files, frozenset(path for path in listing.directories if not _is_hidden(path)))


def _is_hidden(path: str) -> bool:
    return any(is_ignored(part) for part in path.split("/"))
