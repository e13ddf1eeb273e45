"""A model whose files came with the load request: a directory of its own, removed when its last version is closed."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from modelserver.errors import InvalidArgumentError


class ReplacementDirectory:
    """A temporary model directory, kept as long as somebody holds it.

    The maker holds it once. `acquire` and `release` may be called from any thread.
    """

    def __init__(self, model_name: str, files: Mapping[str, bytes | Path]) -> None:
        """Write `files` (path relative to the model directory -> content, or a file to copy). Blocking.

        Raises InvalidArgumentError for a path that would leave the directory.
        """
        paths = {path: contained_path(path) for path in files}
        self.path = Path(tempfile.mkdtemp(prefix=f"modelserver-{model_name[:60]}-"))
        self._num_holders = 1
        self._lock = threading.Lock()  # guards _num_holders
        try:
            for path, content in files.items():
                self._write(paths[path], content)
        except BaseException:
            self.release()
            raise

    def acquire(self) -> None:
        """Hold the directory once more."""
        with self._lock:
            assert self._num_holders > 0, "a replacement directory is acquired before its last release"
            self._num_holders += 1

    def release(self) -> None:
        """Let go; the last one removes the directory. Blocking."""
        with self._lock:
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, relative: PurePosixPath, content: bytes | Path) -> None:
        target = self.path / relative
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_bytes(content)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise InvalidArgumentError(
                f"file override '{relative}' names a directory that another override uses as a file, or the reverse"
            ) from error


def contained_path(path: str) -> PurePosixPath:
    """The relative path; raises InvalidArgumentError when it is not plainly inside the model directory."""
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise InvalidArgumentError(
            f"invalid file override path {path!r}: expected '<version>/<file>' inside the model directory, "
            "without empty, '.' or '..' parts"
        )
    return PurePosixPath(*parts)
