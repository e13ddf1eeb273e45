"""An object store as a tree of files: listed at once, fetched one by one. This module knows fsspec, but no models."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from modelserver.errors import UnavailableError
from modelserver.store.cloud_uri import CloudUri

Result = TypeVar("Result")

# Fields of a listing that change with a file's content, best first.
_TAG_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
_LIBRARIES = {"s3": "s3fs", "gcs": "gcsfs", "abfs": "adlfs"}


class CloudUnavailableError(UnavailableError):
    """An object store cannot be reached or read, or its files have changed since they were listed."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as a listing shows it; equal tags mean equal contents."""

    size_bytes: int
    tag: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Files and directories below a directory, by their path relative to it."""

    files: Mapping[str, RemoteFile]
    directories: frozenset[str] = frozenset()


class CloudStore:
    """One repository's object store. Methods block, may be called from any thread, and raise CloudUnavailableError."""

    def __init__(self, uri: CloudUri, options: Mapping[str, Any]) -> None:
        self.uri = uri
        self._files = self._guard("opened", lambda: open_filesystem(uri, options))

    def list(self, directory: str = "") -> Listing:
        """Everything below the repository, or below one of its directories; empty if the directory does not exist."""
        top = f"{self.uri.path}/{directory}" if directory else self.uri.path

        def find() -> dict[str, dict[str, Any]]:
            try:
                found: dict[str, dict[str, Any]] = self._files.find(top, withdirs=True, detail=True)
            except FileNotFoundError:
                if not directory:
                    raise
                return {}
            return found

        return _listing(self._guard("listed", find), top)

    def file(self, path: str) -> RemoteFile | None:
        """One file, by its path relative to the repository; None if it does not exist."""

        def find() -> Any:
            try:
                return self._files.info(f"{self.uri.path}/{path}")
            except FileNotFoundError:
                return None

        found = self._guard(f"read: '{path}'", find)
        return None if found is None or found.get("type") == "directory" else _remote_file(found)

    def fetch(self, path: str, file: RemoteFile, target: Path) -> None:
        """Copy a file (path relative to the repository) to `target`. It must still be the one that was listed."""
        remote = f"{self.uri.path}/{path}"
        self._guard(f"read: '{path}'", lambda: self._files.get_file(remote, str(target)))
        now = _remote_file(self._guard(f"read: '{path}'", lambda: self._files.info(remote)))
        size_bytes = target.stat().st_size
        if now != file or size_bytes != file.size_bytes:
            raise CloudUnavailableError(
                f"'{self.uri.text}/{path}' changed while it was fetched: expected {file.size_bytes} bytes with tag "
                f"{file.tag}, got {size_bytes} with tag {now.tag}; load again when the upload is complete"
            )

    def _guard(self, what: str, action: Callable[[], Result]) -> Result:
        """Converts the errors of the object stores' libraries."""
        try:
            return action()
        except CloudUnavailableError:
            raise
        except Exception as error:
            raise CloudUnavailableError(
                f"model repository '{self.uri.text}' cannot be {what}: {type(error).__name__}: {error}"
            ) from error


def open_filesystem(uri: CloudUri, options: Mapping[str, Any], what: str = "model repository") -> Any:
    """fsspec's file system of an address of `what`. Raises CloudUnavailableError if its library is not installed."""
    library = _LIBRARIES.get(uri.protocol, "fsspec")
    try:
        importlib.import_module(library)
        fsspec = importlib.import_module("fsspec")
    except ModuleNotFoundError as error:
        raise CloudUnavailableError(
            f"{what} '{uri.text}' needs the Python package '{library}', which is not installed: "
            "pip install 'modelserver-py[cloud]'"
        ) from error
    # Listings serve to detect changes, so fsspec must not cache them.
    return fsspec.filesystem(uri.protocol, skip_instance_cache=True, use_listings_cache=False, **options)


def _listing(found: Mapping[str, Mapping[str, Any]], top: str) -> Listing:
    files: dict[str, RemoteFile] = {}
    directories: set[str] = set()
    for name, details in found.items():
        path = name.strip("/").removeprefix(top.strip("/")).strip("/")
        if not path:
            continue
        # A console's "folder" is an empty file with a slash at the end.
        if details.get("type") == "directory" or name.endswith("/"):
            directories.add(path)
        else:
            files[path] = _remote_file(details)
        parts = path.split("/")
        directories |= {"/".join(parts[:length]) for length in range(1, len(parts))}
    return Listing(files, frozenset(directories))


def _remote_file(details: Mapping[str, Any]) -> RemoteFile:
    return RemoteFile(int(details.get("size") or 0), tag_of(details))


def tag_of(details: Mapping[str, Any]) -> str:
    """A text that changes with the file's content, by what a listing says of it."""
    tag = next((details[key] for key in _TAG_KEYS if details.get(key) is not None), "")
    if isinstance(tag, datetime):
        tag = tag.timestamp()
    return str(tag).strip('"')
