"""The parameters of a load."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from modelserver.errors import InvalidArgumentError
from modelserver.repository.held_resource import HeldResource

# Limits of file systems for a name, and for a path below a directory that the server chooses.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 2048


class ReplacementDirectory(HeldResource):
    """The directory of a model whose files came with the load request, removed when its last version is closed."""

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


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Replacements for the model on disk: a config (JSON), and with it all files.

    A file is its content, or a path to copy it from. `version` limits the load to that version, regardless of the
    version policy. `persists` True stores the override for later starts, False deletes the stored override,
    None leaves it unchanged. `drops_override`: the model serves as on disk, where a config without files would
    otherwise stay. `is_stored`: this is the stored override; or, with nothing else given: use the stored override if
    it exists.
    """

    config_json: str | None = None
    files: Mapping[str, bytes | Path] | None = None
    version: int | None = None
    persists: bool | None = None
    drops_override: bool = False
    is_stored: bool = False

    def __post_init__(self) -> None:
        if self.files and self.config_json is None:
            raise InvalidArgumentError(
                "failed to poll from model repository: file overrides need the parameter 'config' too, as they replace "
                "the whole model directory"
            )
        for path in self.files or ():
            contained_path(path)
        if self.persists and self.config_json is None:
            raise InvalidArgumentError("load parameter 'persist': there is no override to keep; give 'config' as well")
        if self.drops_override and self.config_json is not None:
            raise InvalidArgumentError("load parameter 'override': false is for loads without 'config'; leave one out")
        if self.persists is not None and self.version is not None:
            raise InvalidArgumentError(
                "load parameter 'persist': an override is kept for all versions of a model, not for one; "
                "leave 'version' out"
            )

    @property
    def is_plain(self) -> bool:
        return self.config_json is None and not self.files
