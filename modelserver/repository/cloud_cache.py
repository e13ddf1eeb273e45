"""Local copies of models from object stores. Each content is stored once, even if several versions contain it.

    <directory>/blobs/<digest>                       a file's content, by its address and tag
    <directory>/trees/<repository>/<model>/<digest>  one state of a model: links to blobs

Everything is written to a temporary name and renamed, so that it is complete. Models never write to trees.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from modelserver.errors import InternalError, InvalidArgumentError
from modelserver.repository.held_resource import HeldResource
from modelserver.store.cloud_store import Listing, RemoteFile

logger = logging.getLogger(__name__)

_NUM_FETCHES = 8
_TEMPORARY = "."
_LEFTOVER_AGE_S = 86_400.0

# Copies one file, by its path in the model, to a local path.
Fetch = Callable[[str, RemoteFile, Path], None]


class CloudTree(HeldResource):
    """One state of a model on disk. It is not evicted while it is held."""

    def __init__(self, path: Path, on_free: Callable[[Path], None]) -> None:
        super().__init__()
        self.path = path
        self._on_free = on_free

    def _free(self) -> None:
        self._on_free(self.path)


class CloudCache:
    """Makes trees and evicts the least recently used ones. Methods block and may be called from any thread."""

    def __init__(self, directory: Path, *, max_bytes: int = 0) -> None:
        """`max_bytes` limits the unused copies (0: no limit). Raises InvalidArgumentError for an unusable directory."""
        self._blobs = directory / "blobs"
        self._trees = directory / "trees"
        self._max_bytes = max_bytes
        self._lock = (
            threading.Lock()
        )  # guards _num_uses and _claims, and evicting against taking a tree or a blob into use
        self._num_uses: dict[Path, int] = {}
        self._claims: list[frozenset[Path]] = []  # blobs that are about to be linked
        try:
            for path in (self._blobs, self._trees):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._drop_leftovers()
        except OSError as error:
            raise InvalidArgumentError(
                f"--cloud-cache-directory={directory} cannot be used: {error.strerror}"
            ) from error

    def _drop_leftovers(self) -> None:
        """Remove unfinished files of killed servers. Recent files stay: another server may still be writing them."""
        oldest_s = time.time() - _LEFTOVER_AGE_S
        for path in (*self._blobs.glob(f"{_TEMPORARY}*"), *self._trees.glob(f"*/*/{_TEMPORARY}*")):
            if path.stat().st_mtime < oldest_s:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def materialise(self, repository: str, model: str, listing: Listing, fetch: Fetch) -> CloudTree:
        """The tree of a model as listed, held once by the caller. Only missing files are fetched.

        Raises what `fetch` raises, and InternalError when the disk fails; fetched files are kept for the next attempt.
        """
        path = self._tree_path(repository, model, listing)
        self._take(path)
        try:
            if not path.is_dir():
                self._make(path, f"{repository}/{model}", listing, fetch)
            os.utime(path)
        except OSError as error:
            self._let_go(path)
            raise InternalError(f"model '{model}' of {repository} cannot be copied to {path}: {error}") from error
        except BaseException:
            self._let_go(path)
            raise
        self._evict()
        return CloudTree(path, self._let_go)

    def _tree_path(self, repository: str, model: str, listing: Listing) -> Path:
        state = [sorted(listing.directories), sorted((path, *_fields(file)) for path, file in listing.files.items())]
        return self._trees / _digest(repository)[:16] / model / _digest(state)

    def _take(self, path: Path) -> None:
        with self._lock:
            self._num_uses[path] = self._num_uses.get(path, 0) + 1

    def _let_go(self, path: Path) -> None:
        with self._lock:
            self._num_uses[path] -= 1
            if not self._num_uses[path]:
                del self._num_uses[path]

    def _make(self, path: Path, origin: str, listing: Listing, fetch: Fetch) -> None:
        blobs = {
            relative: self._blobs / _digest([f"{origin}/{relative}", *_fields(file)])
            for relative, file in listing.files.items()
        }
        claim = frozenset(blobs.values())
        with self._lock:
            self._claims.append(claim)
        try:
            self._fetch_missing(blobs, origin, listing, fetch)
            self._link(path, blobs, listing)
        finally:
            with self._lock:
                self._claims.remove(claim)

    def _fetch_missing(self, blobs: Mapping[str, Path], origin: str, listing: Listing, fetch: Fetch) -> None:
        missing = [relative for relative, blob in blobs.items() if not blob.exists()]
        if missing:
            size_bytes = sum(listing.files[relative].size_bytes for relative in missing)
            logger.info("%s: fetching %d of %d files, %d bytes", origin, len(missing), len(blobs), size_bytes)
        with ThreadPoolExecutor(_NUM_FETCHES, thread_name_prefix="cloud-fetch") as pool:
            jobs = [
                pool.submit(self._fetch_blob, relative, listing.files[relative], blobs[relative], fetch)
                for relative in missing
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _link(self, path: Path, blobs: Mapping[str, Path], listing: Listing) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=path.parent))
        try:
            for directory in sorted(listing.directories):
                (temporary / directory).mkdir(parents=True, exist_ok=True)
            for relative, blob in blobs.items():
                (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
                os.link(blob, temporary / relative)
            _rename(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _fetch_blob(self, relative: str, file: RemoteFile, blob: Path, fetch: Fetch) -> None:
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._blobs)
        os.close(descriptor)
        temporary = Path(name)
        try:
            fetch(relative, file, temporary)
            temporary.chmod(0o444)
            with suppress(FileExistsError):  # another load has fetched it meanwhile, and may be linking it
                os.link(temporary, blob)
        finally:
            temporary.unlink(missing_ok=True)

    def _evict(self) -> None:
        """Remove the least recently used trees until the rest fits; then remove blobs that no tree uses."""
        if not self._max_bytes:
            return
        with self._lock:
            total = sum(blob.stat().st_size for blob in self._whole_blobs())
            if total <= self._max_bytes:
                return
            unused = [tree for tree in self._all_trees() if tree not in self._num_uses]
            for tree in sorted(unused, key=lambda tree: tree.stat().st_mtime_ns):
                shutil.rmtree(tree, ignore_errors=True)
                total -= self._drop_unlinked_blobs()
                if total <= self._max_bytes:
                    return
        logger.warning("the models in use take %d bytes of --cloud-cache-byte-size=%d", total, self._max_bytes)

    def _all_trees(self) -> Iterator[Path]:
        return (tree for tree in self._trees.glob("*/*/*") if not tree.name.startswith(_TEMPORARY))

    def _whole_blobs(self) -> Iterator[Path]:
        return (blob for blob in self._blobs.iterdir() if not blob.name.startswith(_TEMPORARY))

    def _drop_unlinked_blobs(self) -> int:
        """Remove a tree; returns the number of bytes freed."""
        freed = 0
        for blob in self._whole_blobs():
            status = blob.stat()
            if status.st_nlink == 1 and not any(blob in claim for claim in self._claims):
                blob.unlink()
                freed += status.st_size
        return freed


def _fields(file: RemoteFile) -> tuple[int, str]:
    return file.size_bytes, file.tag


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:40]


def _rename(temporary: Path, path: Path) -> None:
    """If another load has made the same tree meanwhile, that tree is kept."""
    try:
        temporary.rename(path)
    except OSError:
        if not path.is_dir():
            raise
