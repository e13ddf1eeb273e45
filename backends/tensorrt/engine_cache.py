"""Engines that were built from ONNX files, by the content of all that went into them.

Not by the plan: the same input may give other bytes. Two servers that want the same engine build it once, by a lock
on a file; a plan that does not have the checksum of its description is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.backend import InvalidArgumentError, UnavailableError, always

from .build_options import BuildRequest
from .builder import BuildResult, IsWanted
from .engine_info import EngineInfo
from .plan import read_header
from .sidecar import built_facts, file_sha256, read_sidecar, sidecar_path, write_sidecar

log = logging.getLogger(__name__)

_POLL_S = 0.2
# Of temporary files: older ones are left from a process that died.
_STALE_S = 24 * 3600.0

Build = Callable[[Path], BuildResult]


@dataclass(frozen=True, slots=True)
class CachedEngine:
    """A plan in the cache; `is_hit` says that it was there before."""

    plan: Path
    info: EngineInfo
    is_hit: bool


def cache_key(
    request: BuildRequest, *, external: tuple[Path, ...], library_version: str, target: Mapping[str, Any]
) -> str:
    """The name of the engine: a digest of the ONNX file, of the files beside it, of every option, and of the machine.

    `target` is what the engine depends on of the GPU and its driver, empty if nothing.
    """
    options = request.options.to_json()
    options.pop("timing_cache")
    document = {
        "onnx": file_sha256(Path(request.onnx)),
        "external": {path.name: file_sha256(path) for path in external},
        "flavour": request.flavour.value,
        "library_version": library_version,
        "options": options,
        "plugins": [file_sha256(Path(path)) for path in request.options.plugins],
        "profiles": request.to_json()["profiles"],
        "target": dict(target),
        "converter": _converter() if request.options.precision != "keep" else "",
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _converter() -> str:
    """The version of the library that converts precisions, because versions may convert differently."""
    try:
        return importlib.metadata.version("onnxruntime")
    except importlib.metadata.PackageNotFoundError:
        return ""


class EngineCache:
    """One directory. Only its owner may write there: an engine is code."""

    def __init__(self, directory: Path, max_bytes: int = 0) -> None:
        """`max_bytes` 0 keeps everything. Raises UnavailableError for a directory that cannot be made or trusted."""
        self._directory = directory
        self._max_bytes = max_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
        except OSError as error:
            raise UnavailableError(
                f"{directory}: engines cannot be kept there: {error.strerror}; say where with "
                "--backend-config=tensorrt,engine-cache-dir=DIRECTORY"
            ) from error
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnavailableError(
                f"{directory}: expected a directory of user {os.geteuid()} that no one else can write to, because an "
                f"engine is code; it belongs to {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o} "
                f"(chmod 700 {directory})"
            )

    def obtain(self, key: str, build: Build, *, facts: Mapping[str, Any], is_wanted: IsWanted = always) -> CachedEngine:
        """The engine of this key, built by `build` (which writes the plan to the path that it is given) if need be.

        Raises what `build` raises, and UnavailableError when `is_wanted` says no while another builds it.
        """
        plan = self._directory / f"{key}.plan"
        with self._lock(key, is_wanted):
            found = self._find(plan)
            if found is not None:
                _touch(plan)
                return CachedEngine(plan, found, is_hit=True)
            self._remove(plan)
            info = self._build(plan, build, facts)
        self._shrink(keep=plan)
        return CachedEngine(plan, info, is_hit=False)

    def forget(self, key: str) -> None:
        """Drop an engine that turned out not to load."""
        with self._lock(key, always):
            self._remove(self._directory / f"{key}.plan")

    def kernels_path(self, key: str) -> Path:
        """Where the kernels that are compiled at run time are kept."""
        return self._directory / f"{key}.rtcache"

    def _find(self, plan: Path) -> EngineInfo | None:
        try:
            sidecar = read_sidecar(plan)
            if sidecar is None or not plan.is_file():
                return None
            if file_sha256(plan) == sidecar.sha256:
                return sidecar.info
            log.warning("%s has not the bytes that were written; the engine is built again", plan)
        except (InvalidArgumentError, OSError) as error:
            log.warning("%s cannot be used; the engine is built again: %s", plan, error)
        return None

    def _build(self, plan: Path, build: Build, facts: Mapping[str, Any]) -> EngineInfo:
        temporary = plan.with_name(f".{plan.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            result = build(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            header = read_header(temporary)
            digest = file_sha256(temporary)
            # The description first: a plan without one is not used, one with another's is seen by its checksum.
            told = {**facts, "duration_s": round(result.duration_s, 3), "peak_memory_bytes": result.peak_memory_bytes}
            write_sidecar(plan, result.info, digest, built_facts(header, told))
            temporary.replace(plan)
        finally:
            temporary.unlink(missing_ok=True)
        return result.info

    def _remove(self, plan: Path) -> None:
        for path in (plan, sidecar_path(plan), plan.with_suffix(".rtcache")):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock(self, key: str, is_wanted: IsWanted) -> Iterator[None]:
        """Between processes, and between threads of this one: each opens the file anew."""
        descriptor = os.open(self._directory / f".{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not is_wanted():
                        raise UnavailableError(
                            "waiting for another process to build the engine was cancelled"
                        ) from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _shrink(self, *, keep: Path) -> None:
        """Remove the engines that were not used for longest until the rest fits, and what dead processes left."""
        now_s = time.time()
        for path in self._directory.glob(".*.plan.*"):
            with contextlib.suppress(OSError):
                if now_s - path.stat().st_mtime > _STALE_S:
                    path.unlink()
        if not self._max_bytes:
            return
        plans = []
        for path in self._directory.glob("*.plan"):
            with contextlib.suppress(OSError):
                status = path.stat()
                plans.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in plans)
        for _, size, path in sorted(plans):
            if total <= self._max_bytes:
                return
            if path != keep:
                log.info("%s is removed: the cache holds %d bytes, and may hold %d", path, total, self._max_bytes)
                self._remove(path)
                total -= size


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)
