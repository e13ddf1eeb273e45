"""From the address of a repository in an object store to the repository, with credentials and a place for copies."""

from __future__ import annotations

import os
from pathlib import Path

from modelserver.repository.cloud_cache import CloudCache
from modelserver.repository.cloud_credentials import storage_options
from modelserver.repository.cloud_root import CloudRoot
from modelserver.repository.cloud_store import CloudStore
from modelserver.repository.cloud_uri import CloudUri
from modelserver.repository.options import RepositoryOptions
from modelserver.repository.roots import RepositoryRoot

# Triton's variables for where models of each cloud are copied to.
_VARIABLES = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def open_cloud_root(uri: CloudUri, options: RepositoryOptions) -> RepositoryRoot:
    """Raises UnavailableError when the library is missing, InvalidArgumentError for a file or directory of no use."""
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
