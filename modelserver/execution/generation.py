"""What a loaded model is called in the keys of cached answers: another load is another model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from modelserver.backend import BackendContext

_RANDOM_BYTES = 16


def make_generation(context: BackendContext, *, is_shared: bool) -> bytes:
    """A name that no other load has; or, for a cache that other servers share, one that says what was loaded.

    That is the same wherever the config is the same, and the model's files by path, size and time of change.
    Blocking if it is shared.
    """
    model = repr((context.namespace, context.model_name, context.version)).encode()
    if not is_shared:
        return model + os.urandom(_RANDOM_BYTES)
    content = blake2b(repr(context.config).encode(), digest_size=_RANDOM_BYTES)
    for directory in dict.fromkeys((context.model_directory, context.version_directory)):
        for path in sorted(_files(directory, is_deep=directory == context.version_directory)):
            status = path.stat()
            content.update(repr((path.name, str(path.parent.relative_to(directory)))).encode())
            content.update(repr((status.st_size, status.st_mtime_ns)).encode())
    return model + content.digest()


def _files(directory: Path, *, is_deep: bool) -> Iterator[Path]:
    """The files of a directory; only of it, and not below it, unless `is_deep`. Python's own caches do not count."""
    for root, names, files in os.walk(directory):
        names[:] = [name for name in names if is_deep and name != "__pycache__"]
        yield from (Path(root, name) for name in files)
