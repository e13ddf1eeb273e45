"""What tells one state of a model's files from another: names, sizes and modification times.

Symbolic links are followed, hidden entries and `__pycache__` are ignored. Nothing is ever written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileStamp:
    """One file, or one directory (path ends with '/', size and time 0); `path` is relative to its tree.

    A link that leads nowhere has size -1, so that mending it is a change.
    """

    path: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class TreeFingerprint:
    """All that is visible in one directory tree, sorted by path."""

    files: tuple[FileStamp, ...] = ()

    @property
    def latest_mtime_ns(self) -> int:
        return max((file.mtime_ns for file in self.files), default=0)

    def is_contained_in(self, other: TreeFingerprint) -> bool:
        """Whether every entry is in `other` unchanged; `other` may have more."""
        return set(self.files) <= set(other.files)


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """A model's directory in two parts: each version's directory, and what all versions share."""

    directory: Path = Path()
    shared: TreeFingerprint = TreeFingerprint()
    versions: Mapping[int, TreeFingerprint] = field(default_factory=dict)

    @property
    def latest_mtime_ns(self) -> int:
        return max(tree.latest_mtime_ns for tree in (self.shared, *self.versions.values()))


def fingerprint_tree(directory: Path, *, skip: Collection[str] = ()) -> TreeFingerprint:
    """The fingerprint of everything below `directory`, but for its own entries named in `skip`.

    Raises OSError when a directory cannot be read; a file that vanishes meanwhile is left out.
    """
    return TreeFingerprint(tuple(sorted(_walk(directory, "", frozenset(skip), ()), key=lambda file: file.path)))


def is_ignored(name: str) -> bool:
    """Whether an entry of that name is no part of a model: hidden, or Python's own by-product."""
    return name.startswith(".") or name == "__pycache__"


def _walk(
    directory: Path, prefix: str, skip: Collection[str], ancestors: tuple[tuple[int, int], ...]
) -> Iterator[FileStamp]:
    identity = _identity(directory)
    if identity in ancestors:  # a link back to a directory that we are in
        return
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if not is_ignored(entry.name) and entry.name not in skip)
    for name in names:
        path = directory / name
        try:
            status = path.stat()
        except OSError:
            if path.is_symlink():
                yield FileStamp(prefix + name, -1, 0)
            continue
        if stat.S_ISDIR(status.st_mode):
            yield FileStamp(f"{prefix}{name}/", 0, 0)
            yield from _walk(path, f"{prefix}{name}/", (), (*ancestors, identity))
        else:
            yield FileStamp(prefix + name, status.st_size, status.st_mtime_ns)


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino
