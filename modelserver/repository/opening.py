"""Opens the roots of `--model-repository`; roots in object stores get credentials and a directory for copies."""

from __future__ import annotations

import os
from pathlib import Path

from modelserver.backend.discovery import backend_for_model_files
from modelserver.repository.cloud_cache import CloudCache
from modelserver.repository.cloud_root import CloudRoot
from modelserver.repository.cloud_store import CloudStore
from modelserver.repository.cloud_uri import CloudUri, storage_options
from modelserver.repository.options import RepositoryOptions
from modelserver.repository.roots import RepositoryRoot, name_roots, resolve_roots

# Triton's variables for the directory of each cloud's copies.
_VARIABLES = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def open_roots(options: RepositoryOptions) -> tuple[RepositoryRoot, ...]:
    """The roots in the order of the options. Blocking; raises ServerError for one that cannot be used."""
    local = [path for path in options.roots if isinstance(path, Path)]
    found = iter(resolve_roots(local, model_name=options.model_name, find_backend=backend_for_model_files))
    roots = [next(found) if isinstance(path, Path) else _open_cloud_root(path, options) for path in options.roots]
    return name_roots(roots, are_namespaces=options.has_namespaces)


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
