"""Blobs by their digest on a disk that several processes share. Every blob in place is whole and has its digest.

    blobs/sha256-<hex>   a blob; Ollama's name for it
    partial/<key>        a blob that is being written; its writer holds a lock on it
    claims/<uuid>        the digests that an unfinished operation needs; its process holds a lock on it
    .lock                held for a moment by whoever adds a claim, writes a manifest or removes blobs

A lock ends with its process, so nothing is left locked by one that was killed. Blobs are removed only under `.lock`,
and only those that neither a manifest nor a living claim names: a manifest is written before its claim ends.

`write_whole` writes any other file so that a crash leaves the old content or the new.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelserver.errors import ErrorCode, InternalError, InvalidArgumentError, NotFoundError, ServerError
from modelserver.store.manifest import check_digest
from modelserver.store.task import StoreTask

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK = 1 << 20
_LOCK_POLL_S = 0.1
# Blobs without a manifest may belong to a client that uploads the files of a model one by one.
_UNCLAIMED_AGE_S = 3600.0
_PARTIAL_AGE_S = 7 * 86400.0
# Begins the keys of partial files that are not resumed.
_NEW = "new-"


class StorageFullError(ServerError):
    """The disk of the store has no room for a blob."""

    code = ErrorCode.UNAVAILABLE


class DigestError(InvalidArgumentError):
    """The content of a blob is not what its digest says."""


class Blobs:
    """The blobs of one store. Methods block, and may be called from any thread of any process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._blobs = directory / "blobs"
        self._partials = directory / "partial"
        self._claims = directory / "claims"

    def path(self, digest: str) -> Path:
        """The file of a blob, whether it exists or not. Raises InvalidArgumentError for an invalid digest."""
        return self._blobs / check_digest(digest).replace(":", "-")

    def size(self, digest: str) -> int | None:
        """The size of a blob in bytes; None if it is not there."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, digest: str, max_bytes: int) -> bytes:
        """A small blob's content. Raises NotFoundError for a missing one, InvalidArgumentError for a larger one."""
        try:
            with self.path(digest).open("rb") as file:
                content = file.read(max_bytes + 1)
        except FileNotFoundError:
            raise NotFoundError(f"blob {digest} is not in the store {self._directory}") from None
        if len(content) > max_bytes:
            raise InvalidArgumentError(f"blob {digest} is larger than {max_bytes} bytes")
        return content

    def check_room(self, needed_bytes: int, what: str) -> None:
        """Raise StorageFullError unless the disk has room for that many more bytes."""
        self.make_directories()
        free_bytes = shutil.disk_usage(self._directory).free
        if needed_bytes > free_bytes:
            raise self._full(what, needed_bytes, free_bytes)

    def make_directories(self) -> None:
        """Raises InternalError for a store that cannot be written."""
        try:
            for path in (self._blobs, self._partials, self._claims):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InternalError(f"the model store {self._directory} cannot be written: {error.strerror}") from error

    def write(self, digest: str | None, chunks: Iterable[bytes], task: StoreTask, what: str = "") -> str:
        """Store a blob in one go and return its digest; with `digest` given it must have that one.

        Raises DigestError, StorageFullError, and what `chunks` raises; nothing is stored then.
        """
        with self.partial(new_key(), task) as partial:
            for chunk in chunks:
                task.check()
                partial.append(chunk, what)
            return partial.finish(digest, what)

    def add_file(self, path: Path, task: StoreTask) -> str:
        """Copy a file of this machine into the store; returns its digest. Raises NotFoundError and as `write`."""
        try:
            size_bytes = path.stat().st_size
            file = path.open("rb")
        except OSError as error:
            raise NotFoundError(f"cannot read '{path}': {error.strerror}") from None

        def chunks() -> Iterator[bytes]:
            done = 0
            while chunk := file.read(_CHUNK):
                done += len(chunk)
                task.report(f"copying {path.name}", path.name, size_bytes, done)
                yield chunk

        with file:
            self.check_room(size_bytes, path.name)
            return self.write(None, chunks(), task, path.name)

    def adopt(self, path: Path, task: StoreTask) -> str:
        """Move a complete file of the store's own disk into place; returns its digest."""
        found = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                task.check()
                found.update(chunk)
        digest = f"sha256:{found.hexdigest()}"
        self.place(path, digest)
        return digest

    @contextmanager
    def partial(
        self, key: str, task: StoreTask, while_waiting: Callable[[int], None] | None = None
    ) -> Iterator[PartialBlob]:
        """The partial file of that key, alone among all processes; it is kept if the block raises, unless it is empty.

        `while_waiting` is called with its size while another process writes it. Raises CancelledError meanwhile.
        """
        self.make_directories()
        path = self._partials / key
        while (fd := _try_lock(path)) is None:
            if while_waiting is not None:
                with suppress(FileNotFoundError):
                    while_waiting(path.stat().st_size)
            task.wait(_LOCK_POLL_S)
        try:
            partial = PartialBlob(fd, path, self)
            try:
                yield partial
            finally:
                if not partial.is_finished and (key.startswith(_NEW) or not partial.size_bytes):
                    path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def partial_size(self, key: str) -> int:
        """The bytes that an earlier attempt has left."""
        try:
            return (self._partials / key).stat().st_size
        except FileNotFoundError:
            return 0

    def temporary(self) -> Path:
        """A path for a small file that is renamed when it is complete."""
        return self._partials / new_key()

    def place(self, partial: Path, digest: str) -> None:
        """Move a complete file into place."""
        partial.chmod(0o644)
        partial.replace(self.path(digest))

    def full_error(self, error: OSError, what: str, needed_bytes: int = 0) -> ServerError:
        """The error to raise for a failed write."""
        if error.errno in _FULL:
            return self._full(what, needed_bytes, shutil.disk_usage(self._directory).free)
        return InternalError(f"the model store {self._directory} cannot be written: {error.strerror}")

    def _full(self, what: str, needed_bytes: int, free_bytes: int) -> StorageFullError:
        needs = f" needs {_size_text(needed_bytes)} more" if needed_bytes else " does not fit"
        return StorageFullError(
            f"no space left for the model store {self._directory}: {what or 'a blob'}{needs}, and "
            f"{_size_text(free_bytes)} are free"
        )

    # Who needs which blobs.

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Alone among all processes that change what is referenced. Held briefly; not to be nested."""
        self.make_directories()
        fd = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """A claim on the blobs that are added to it, present or future; it ends with the block."""
        path = self._claims / uuid.uuid4().hex
        with self.exclusive():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield Claim(fd, self)
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def remove_unreferenced(self, referenced: Collection[str], candidates: Iterable[str] | None = None) -> int:
        """Remove those of the candidates that nothing needs; returns the bytes freed. Call it in `exclusive`.

        Without candidates every blob is one that has been there for an hour; old partial files are removed, too.
        """
        needed = {*referenced, *self._claimed()}
        oldest_s = time.time() - _UNCLAIMED_AGE_S
        paths = [self.path(each) for each in candidates] if candidates is not None else list(self._blobs.iterdir())
        freed = 0
        for path in paths:
            if path.name.replace("-", ":", 1) in needed:
                continue
            with suppress(FileNotFoundError):
                status = path.stat()
                if candidates is not None or status.st_mtime < oldest_s:
                    path.unlink()
                    freed += status.st_size
        if candidates is None:
            self._remove_old_partials()
        return freed

    def _claimed(self) -> set[str]:
        """What living operations claim; the claims of dead ones are removed."""
        found: set[str] = set()
        for path in self._claims.iterdir():
            if _is_unlocked(path):
                path.unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError, ValueError):  # just ended
                found |= set(json.loads(path.read_text()))
        return found

    def _remove_old_partials(self) -> None:
        oldest_s = time.time() - _PARTIAL_AGE_S
        for path in self._partials.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest_s and _is_unlocked(path):
                    path.unlink()


class Claim:
    """Keeps blobs from being removed while no manifest names them yet."""

    def __init__(self, fd: int, blobs: Blobs) -> None:
        self._fd = fd
        self._blobs = blobs
        self._digests: set[str] = set()

    def add(self, digests: Iterable[str]) -> None:
        """When this returns nothing removes these blobs; those that were missing are still missing."""
        self._digests |= set(digests)
        with self._blobs.exclusive():
            try:
                os.pwrite(self._fd, json.dumps(sorted(self._digests)).encode(), 0)
            except OSError as error:
                raise self._blobs.full_error(error, "a claim") from error


class PartialBlob:
    """A blob that is being written, open and locked by this process alone."""

    def __init__(self, fd: int, path: Path, blobs: Blobs) -> None:
        self._fd = fd
        self._path = path
        self._blobs = blobs
        self._hash = hashlib.sha256()
        self.size_bytes = 0
        self.is_finished = False
        while chunk := os.read(fd, _CHUNK):  # what an earlier attempt has left
            self._hash.update(chunk)
            self.size_bytes += len(chunk)

    def append(self, chunk: bytes, what: str, needed_bytes: int = 0) -> None:
        """Raises StorageFullError when the disk is full; `needed_bytes` are then named as missing."""
        view = memoryview(chunk)
        try:
            while view:
                written = os.write(self._fd, view)
                self._hash.update(view[:written])
                self.size_bytes += written
                view = view[written:]
        except OSError as error:
            raise self._blobs.full_error(error, what, needed_bytes) from error

    def restart(self) -> None:
        """Forget what was written."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def finish(self, digest: str | None, what: str) -> str:
        """Move the blob into place under its digest, and return that. Raises DigestError; the content is dropped."""
        found = f"sha256:{self._hash.hexdigest()}"
        if digest is not None and check_digest(digest) != found:
            self.restart()
            raise DigestError(f"{what or 'a blob'} is damaged: expected digest {digest}, got {found}")
        try:
            os.fsync(self._fd)
            self._blobs.place(self._path, found)
            self.is_finished = True
        except OSError as error:
            raise self._blobs.full_error(error, what) from error
        return found


def new_key() -> str:
    """The key of a partial file that is removed unless it is finished."""
    return f"{_NEW}{uuid.uuid4().hex}"


def _try_lock(path: Path) -> int | None:
    """The file at `path`, open and locked; made if there is none. None if another process writes it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):  # the latter: it was finished between opening and locking
        pass
    os.close(fd)
    return None


def _is_unlocked(path: Path) -> bool:
    """Whether no process holds a lock on the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _size_text(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def write_whole(path: Path, content: bytes) -> None:
    """Write the file atomically and durably. Raises OSError."""
    with beside(path, content) as temporary:
        temporary.replace(path)
    sync_directory(path.parent)


@contextmanager
def beside(path: Path, content: bytes) -> Iterator[Path]:
    """A temporary file with the content, written durably into the directory of `path`; it ends with the block."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield Path(temporary)
    finally:
        Path(temporary).unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in it durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
