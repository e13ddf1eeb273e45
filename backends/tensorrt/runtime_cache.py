"""The kernels that TensorRT for RTX compiles at first use, kept beside the engine for the next start.

TensorRT itself compiles when it builds, and has none.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from .engine import LoadedEngine

log = logging.getLogger(__name__)


class RuntimeCache:
    """One file, for one engine on one device; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards both below: instances are created at once
        self._cache: Any = None
        self._num_bytes = 0

    def open(self, loaded: LoadedEngine) -> Any:
        """The library's cache, filled from the file; None where the library has none."""
        if self._path is None or not hasattr(loaded.trt, "CudaGraphStrategy"):
            return None
        with self._lock:
            if self._cache is None:
                self._cache = loaded.engine.create_runtime_config().create_runtime_cache()
                kept = _read(self._path)
                # It refuses what another version, GPU or driver has left: then all is compiled anew.
                if kept and self._cache.deserialize(kept):
                    self._num_bytes = len(kept)
            return self._cache

    def save(self) -> None:
        """Write what has been compiled since. A cache that cannot be written is a warning."""
        with self._lock:
            if self._cache is None or self._path is None:
                return
            kept = bytes(self._cache.serialize())
            self._cache = None
            if not kept or len(kept) == self._num_bytes:
                return
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            try:
                temporary.write_bytes(kept)
                temporary.replace(self._path)
            except OSError as error:
                log.warning("the kernels of %s cannot be kept: %s", self._path, error)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
