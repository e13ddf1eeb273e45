"""Stored overrides: a load's replacements for the repository's files, kept on disk across restarts.

    <directory>/models/<model>.json   config, and the files by path with size and SHA-256
    <directory>/blobs/<sha256>        the content of a file, shared by all overrides with it

A file is written under a temporary name, synced and renamed: after a crash the old or the new override is complete.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from modelserver.errors import InternalError, InvalidArgumentError
from modelserver.repository.load_request import LoadRequest
from modelserver.store.blobs import sync_directory, write_whole

logger = logging.getLogger(__name__)

_FORMAT = 1
_SUFFIX = ".json"
_LONGEST_NAME_BYTES = 200  # a file system takes 255, suffixes and names of temporary files included
_CHUNK_BYTES = 1 << 20


class _StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    size_bytes: int


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`sha256` covers the other fields, so that an edited or truncated manifest is detected."""

    format: int
    model: str
    config: str
    files: dict[str, _StoredFile]
    sha256: str = ""

    def digest(self) -> str:
        parts = [
            self.format,
            self.model,
            self.config,
            sorted((path, *_fields(file)) for path, file in self.files.items()),
        ]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class OverrideStore:
    """Saves, finds and forgets overrides by model. Methods block and may be called from any thread.

    A directory belongs to one server at a time.
    """

    def __init__(self, directory: Path) -> None:
        """Raises InvalidArgumentError for a directory that cannot be made or written."""
        self._directory = directory
        self._models = directory / "models"
        self._blobs = directory / "blobs"
        self._lock = threading.Lock()  # guards the directory's files
        try:
            for path in (directory, self._models, self._blobs):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise InvalidArgumentError(f"--override-directory={directory} cannot be used: {error.strerror}") from error

    def names(self) -> tuple[str, ...]:
        """The models that have an override, sorted."""
        with self._lock:
            return tuple(sorted(path.stem for path in self._models.glob(f"*{_SUFFIX}")))

    def has(self, name: str) -> bool:
        return self._manifest_path(name).exists()

    def save(self, name: str, request: LoadRequest) -> None:
        """Store the request's config and files, replacing the model's stored override. Raises ServerError."""
        assert request.config_json is not None, "an override has a config"
        check_storable(name)
        with self._lock:
            try:
                files = {path: self._save_blob(content) for path, content in (request.files or {}).items()}
                manifest = _Manifest(_FORMAT, name, request.config_json, files)
                manifest = msgspec.structs.replace(manifest, sha256=manifest.digest())
                write_whole(self._manifest_path(name), msgspec.json.format(msgspec.json.encode(manifest), indent=2))
                self._drop_unused_blobs()
            except OSError as error:
                raise InternalError(
                    f"model '{name}' serves by its override, but that could not be kept in {self._directory}: {error}"
                ) from error
        logger.info("model '%s': its override is kept in %s", name, self._directory)

    def read(self, name: str) -> LoadRequest | None:
        """The override of a model, its files as paths; None if there is none.

        Raises InvalidArgumentError when it was changed since it was saved.
        """
        path = self._manifest_path(name)
        with self._lock:
            if not path.exists():
                return None
            manifest = self._read_manifest(path, name)
            files: Mapping[str, Path] = {
                relative: self._checked_blob(path, relative, stored) for relative, stored in manifest.files.items()
            }
        return LoadRequest(manifest.config, files or None, is_stored=True)

    def remove(self, name: str) -> None:
        """Forget the override of a model, if there is one. Raises ServerError."""
        with self._lock:
            path = self._manifest_path(name)
            try:
                existed = path.exists()
                path.unlink(missing_ok=True)
                sync_directory(self._models)
                self._drop_unused_blobs()
            except OSError as error:
                raise InternalError(f"the override of model '{name}' in {path} cannot be removed: {error}") from error
        if existed:
            logger.info("model '%s': its override is removed from %s", name, self._directory)

    def _manifest_path(self, name: str) -> Path:
        return self._models / f"{name}{_SUFFIX}"

    def _save_blob(self, content: bytes | Path) -> _StoredFile:
        data = content.read_bytes() if isinstance(content, Path) else content
        digest = hashlib.sha256(data).hexdigest()
        path = self._blobs / digest
        if not path.exists() or path.stat().st_size != len(data):
            write_whole(path, data)
        return _StoredFile(digest, len(data))

    def _read_manifest(self, path: Path, name: str) -> _Manifest:
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
        except (msgspec.MsgspecError, OSError, UnicodeDecodeError) as error:
            raise _damaged(name, path, str(error)) from error
        if manifest.format != _FORMAT or manifest.model != name or manifest.sha256 != manifest.digest():
            raise _damaged(name, path, f"expected SHA-256 {manifest.digest()} of its content, got '{manifest.sha256}'")
        return manifest

    def _checked_blob(self, manifest: Path, relative: str, stored: _StoredFile) -> Path:
        path = self._blobs / stored.sha256
        found = _hash_file(path) if path.exists() else "no file"
        if found != stored.sha256:
            reason = f"file '{relative}': expected SHA-256 {stored.sha256}, got {found}"
            raise _damaged(manifest.stem, manifest, reason)
        return path

    def _drop_unused_blobs(self) -> None:
        """Called with the lock held. An unreadable manifest may use any of the blobs."""
        used: set[str] = set()
        for path in self._models.glob(f"*{_SUFFIX}"):
            try:
                used |= {file.sha256 for file in self._read_manifest(path, path.stem).files.values()}
            except InvalidArgumentError:
                return
        for blob in self._blobs.iterdir():
            if blob.name not in used:
                blob.unlink()


def check_storable(name: str) -> None:
    """Raise InvalidArgumentError for a model whose override cannot be kept."""
    if len(name.encode()) > _LONGEST_NAME_BYTES:
        raise InvalidArgumentError(
            f"load parameter 'persist': the model's name has {len(name.encode())} bytes, "
            f"expected at most {_LONGEST_NAME_BYTES}"
        )


def _fields(file: _StoredFile) -> tuple[Any, ...]:
    return msgspec.structs.astuple(file)


def _damaged(name: str, path: Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the override of model '{name}' that was kept in {path} is damaged: {reason}; "
        "load the model with the parameter persist=false to forget it, or with its override again"
    )


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
