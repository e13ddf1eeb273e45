"""Where a batch reads and writes: a directory of files, on a disk or in an object store."""

from __future__ import annotations

import abc
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from modelserver.errors import InvalidArgumentError, UnavailableError
from modelserver.store.blobs import beside, write_whole
from modelserver.store.cloud_store import open_filesystem, tag_of
from modelserver.store.cloud_uri import is_cloud_uri, parse_cloud_uri, storage_options

Result = TypeVar("Result")

WHAT = "the batch's files"


class Place(abc.ABC):
    """Names are relative and use slashes. Methods block and may be called from any thread.

    They raise OSError or UnavailableError.
    """

    @abc.abstractmethod
    def names(self, directory: str = "") -> dict[str, str]:
        """The files below a directory, and for each a tag that changes when it is written again."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""

    @abc.abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file: readers, and a kill at any moment, leave the old content or the new."""

    @abc.abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Write a new file; False, and nothing is written, if it exists. Of several callers one gets True."""

    @abc.abstractmethod
    def move(self, name: str, target: str) -> None:
        """Rename a file, or replace another. May be repeated after a kill, and done by several workers at once."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Do nothing if the file does not exist."""


class LocalPlace(Place):
    """A directory of this machine, or one that several machines mount."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self, directory: str = "") -> dict[str, str]:
        top = self._directory / directory
        found = {}
        for path in top.rglob("*") if top.is_dir() else ():
            try:
                status = path.stat()
            except FileNotFoundError:  # another worker has removed it
                continue
            if path.is_file() and not path.name.startswith("."):
                found[path.relative_to(self._directory).as_posix()] = f"{status.st_mtime_ns}-{status.st_ino}"
        return found

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        write_whole(self._made(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """A link to a whole file: a kill leaves no file without content under the name."""
        path = self._made(name)
        with beside(path, content) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV):
                    raise
                return _create_without_links(path, content)
        return True

    def move(self, name: str, target: str) -> None:
        path = self._made(target)
        try:
            (self._directory / name).replace(path)
        except FileNotFoundError:
            if not path.exists():  # another worker, or this one before it was killed, has moved it
                raise

    def remove(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def _made(self, name: str) -> Path:
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _create_without_links(path: Path, content: bytes) -> bool:
    """For file systems that have no hard links."""
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


class CloudPlace(Place):
    """A prefix of an object store, whose writes are whole as they are."""

    def __init__(self, uri: str) -> None:
        parsed = parse_cloud_uri(uri, WHAT)
        self._text, self._path = parsed.text, parsed.path
        self._files = open_filesystem(parsed, storage_options(parsed, os.environ), WHAT)

    def names(self, directory: str = "") -> dict[str, str]:
        top = self._at(directory)

        def find() -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = self._files.find(top, detail=True)
            return found

        try:
            found = self._guard("listed", find)
        except FileNotFoundError:
            return {}
        start = self._path.strip("/")
        return {name.strip("/").removeprefix(start).strip("/"): tag_of(details) for name, details in found.items()}

    def read(self, name: str) -> bytes:
        content: bytes = self._guard("read", lambda: self._files.cat_file(self._at(name)))
        return content

    def write(self, name: str, content: bytes) -> None:
        self._guard("written", lambda: self._files.pipe_file(self._at(name), content))

    def create(self, name: str, content: bytes) -> bool:
        try:
            self._guard("written", lambda: self._files.pipe_file(self._at(name), content, mode="create"))
        except FileExistsError:
            return False
        except OSError as error:
            # What an S3 store answers where two creates meet.
            if "PreconditionFailed" in str(error) or "ConditionalRequestConflict" in str(error):
                return False
            raise
        return True

    def move(self, name: str, target: str) -> None:
        try:
            self._guard("moved", lambda: self._files.cp_file(self._at(name), self._at(target)))
        except FileNotFoundError:
            self.read(target)  # it was moved before
            return
        self.remove(name)

    def remove(self, name: str) -> None:
        try:
            self._guard("removed", lambda: self._files.rm_file(self._at(name)))
        except FileNotFoundError:
            return

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _guard(self, what: str, action: Callable[[], Result]) -> Result:
        """Converts the errors of the object stores' libraries, but for OSError."""
        try:
            return action()
        except OSError:
            raise
        except Exception as error:
            raise UnavailableError(f"'{self._text}' cannot be {what}: {type(error).__name__}: {error}") from error


def open_place(text: str) -> Place:
    """The directory or the prefix of an object store. Raises InvalidArgumentError and UnavailableError."""
    return CloudPlace(text) if is_cloud_uri(text) else LocalPlace(Path(text))


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of rows: a path or an address, its size, and a tag that changes with its content."""

    name: str
    size_bytes: int
    tag: str

    @contextmanager
    def local(self) -> Iterator[Path]:
        """The file on this machine while the block runs: a copy, if it is in an object store."""
        if not is_cloud_uri(self.name):
            yield Path(self.name)
            return
        uri = parse_cloud_uri(self.name, WHAT)
        files = open_filesystem(uri, storage_options(uri, os.environ), WHAT)
        directory = Path(tempfile.mkdtemp(prefix="modelserver-batch-"))
        try:
            target = directory / Path(uri.path).name
            try:
                files.get_file(uri.path, str(target))
            except Exception as error:
                raise UnavailableError(f"'{self.name}' cannot be read: {type(error).__name__}: {error}") from error
            yield target
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def find_inputs(patterns: list[str], suffixes: tuple[str, ...]) -> list[InputFile]:
    """The files that paths, patterns, directories and prefixes name, in order of their names.

    Of a directory or prefix those with one of `suffixes`. Raises InvalidArgumentError if one of them names none.
    """
    found: dict[str, InputFile] = {}
    for pattern in patterns:
        files = _cloud_files(pattern, suffixes) if is_cloud_uri(pattern) else _local_files(pattern, suffixes)
        if not files:
            raise InvalidArgumentError(f"'{pattern}' names no file of {', '.join(suffixes)}")
        found |= {file.name: file for file in files}
    return [found[name] for name in sorted(found)]


def _local_files(pattern: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    path = Path(pattern)
    if path.is_dir():
        paths = [each for each in path.rglob("*") if each.suffix in suffixes and each.is_file()]
    elif path.is_file():
        paths = [path]
    else:
        names = glob.glob(pattern, recursive=True)  # noqa: PTH207 - pathlib has no patterns that begin at any directory
        paths = [Path(each) for each in names if Path(each).is_file()]
    files = []
    for each in paths:
        status = each.stat()
        files.append(InputFile(str(each), status.st_size, str(status.st_mtime_ns)))
    return files


def _cloud_files(pattern: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    uri = parse_cloud_uri(pattern, WHAT)
    files = open_filesystem(uri, storage_options(uri, os.environ), WHAT)
    start = pattern.rstrip("/").removesuffix(uri.path)
    try:
        if any(sign in uri.path for sign in "*?["):
            found = files.glob(uri.path, detail=True)
        else:
            found = files.find(uri.path, detail=True)
            if uri.path.strip("/") not in {name.strip("/") for name in found}:
                found = {name: details for name, details in found.items() if name.endswith(suffixes)}
    except FileNotFoundError:
        return []
    except Exception as error:
        raise UnavailableError(f"'{pattern}' cannot be listed: {type(error).__name__}: {error}") from error
    return [
        InputFile(f"{start}{name.strip('/')}", int(details.get("size") or 0), tag_of(details))
        for name, details in found.items()
        if details.get("type") != "directory"
    ]
