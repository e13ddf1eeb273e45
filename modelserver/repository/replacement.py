"""A model whose files came with the load request: a directory of its own, removed when its last version is closed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from modelserver.errors import InvalidArgumentError
from modelserver.repository.holding import Holding

# Limits of file systems for a name, and for a path below a directory that the server chooses.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 2048


class ReplacementDirectory(Holding):
    """A temporary model directory, removed after its last release."""

    def __init__(self, model_name: str, files: Mapping[str, bytes | Path]) -> None:
        """Write `files` (path relative to the model directory -> content, or a file to copy). Blocking.

        Raises InvalidArgumentError for a path that would leave the directory.
        """
        super().__init__()
        paths = {path: contained_path(path) for path in files}
        self.path = Path(tempfile.mkdtemp(prefix=f"modelserver-{model_name[:60]}-"))
        try:
            for path, content in files.items():
                self._write(paths[path], content)
        except BaseException:
            self.release()
            raise

    def _free(self) -> None:
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
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    if max(sizes) > _MAX_NAME_BYTES or sum(sizes) + len(sizes) > _MAX_PATH_BYTES:
        raise InvalidArgumentError(
            f"failed to poll from model repository: the file override path '{path:.100}...' is too long: a path has "
            f"{_MAX_PATH_BYTES} bytes at most, and each name in it {_MAX_NAME_BYTES}; shorten it"
        )
    return PurePosixPath(*parts)
