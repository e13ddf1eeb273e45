"""The directory of files and batches. All functions here block: call them from threads.

lock                        held by the server that uses the directory
files/ID.json, ID.data      a file; without its .json, which is written last, there is none
batches/ID.json             a batch
batches/ID.output, .errors  rows that are written so far; they become files at the end
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson

from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.openai.batches.records import BatchRecord, Document, FileRecord, kept
from modelserver.store.blobs import write_whole

logger = logging.getLogger(__name__)

Record = TypeVar("Record", FileRecord, BatchRecord)

_CHUNK_BYTES = 1 << 20
OUTPUT, ERRORS = "output", "errors"


class BatchStorage:
    """Keeps records and data. Records are written as wholes, and survive a kill at any moment."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidArgumentError for a directory that cannot be used, or that another server uses."""
        self._files, self._batches = directory / "files", directory / "batches"
        try:
            for each in (self._files, self._batches):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgumentError(f"--batch-directory={directory}: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InvalidArgumentError(f"--batch-directory={directory}: another server uses it") from None

    def close(self) -> None:
        """Let another server use the directory."""
        os.close(self._lock)

    def load(self) -> tuple[list[FileRecord], list[BatchRecord]]:
        """What was kept. Removes what an upload or a deletion left behind when it was killed."""
        files, batches = _load(self._files, FileRecord.of), _load(self._batches, BatchRecord.of)
        # Data of a file that a batch was about to publish has no record yet.
        known = {record.id for record in files}
        known |= {name for each in batches for name in (each.output_file_id, each.error_file_id) if name is not None}
        for path in (*self._files.iterdir(), *self._batches.glob(".*")):
            if path.name.startswith(".") or (path.suffix != ".json" and path.stem not in known):
                path.unlink()
        return files, batches

    def save_file(self, record: FileRecord) -> None:
        """Write or replace the record of a file, whose data is there."""
        write_whole(self._files / f"{record.id}.json", orjson.dumps(kept(record)))

    def save_batch(self, record: BatchRecord) -> None:
        """Write or replace a batch."""
        write_whole(self._batches / f"{record.id}.json", orjson.dumps(kept(record)))

    def add_file(self, record: FileRecord, data: Buffer) -> None:
        """Write a new file."""
        with self._data(record.id).open("xb") as file:
            view = memoryview(data)
            for start in range(0, len(view), _CHUNK_BYTES):  # other threads get their turn in between
                file.write(view[start : start + _CHUNK_BYTES])
            file.flush()
            os.fsync(file.fileno())
        self.save_file(record)

    def remove_file(self, file_id: str) -> None:
        """Remove a file; one that is read at the moment stays readable."""
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self._data(file_id).unlink(missing_ok=True)

    def remove_batch(self, batch_id: str) -> None:
        """Remove a batch that has ended; its files are files as others."""
        for suffix in ("json", OUTPUT, ERRORS):
            (self._batches / f"{batch_id}.{suffix}").unlink(missing_ok=True)

    def data(self, file_id: str) -> mmap.mmap | bytes:
        """The content of a file, mapped into memory. Raises OSError."""
        with self._data(file_id).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def open_rows(self, batch_id: str) -> RowLog:
        """The rows of a batch, to be continued."""
        return RowLog(self._batches / f"{batch_id}.{OUTPUT}", self._batches / f"{batch_id}.{ERRORS}")

    def has_rows(self, batch_id: str, kind: str) -> bool:
        """Whether there are rows of one kind that are not published yet."""
        path = self._batches / f"{batch_id}.{kind}"
        return path.exists() and path.stat().st_size > 0

    def publish(self, batch_id: str, kind: str, record: FileRecord) -> None:
        """Make a file of the rows of one kind. Does the rest if it was done in part before."""
        rows = self._batches / f"{batch_id}.{kind}"
        if rows.exists():
            rows.replace(self._data(record.id))
        record.num_bytes = self._data(record.id).stat().st_size
        self.save_file(record)

    def _data(self, file_id: str) -> Path:
        return self._files / f"{file_id}.data"


class RowLog:
    """Rows of a batch: those of answers, and those of errors. Each is written by one call, and never changed."""

    def __init__(self, output: Path, errors: Path) -> None:
        self._paths = {OUTPUT: output, ERRORS: errors}
        self._lock = threading.Lock()  # guards _open, and keeps rows apart
        self._open: dict[str, BinaryIO] = {}

    def recover(self) -> Iterator[tuple[str, Document]]:
        """The kind of each row that was written, and the row. A last row that a kill has cut is removed."""
        for kind, path in self._paths.items():
            if not path.exists():
                continue
            num_whole = 0
            with path.open("r+b") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    num_whole += len(line)
                    yield kind, orjson.loads(line)
                file.truncate(num_whole)

    def append(self, kind: str, rows: Sequence[bytes]) -> None:
        """Write rows. Raises OSError."""
        text = memoryview(b"".join(rows))
        with self._lock:
            file = self._open.get(kind)
            if file is None:
                file = self._open[kind] = self._paths[kind].open("ab", buffering=0)
            while text:
                text = text[file.write(text) :]

    def close(self) -> None:
        """Bring all rows to the disk."""
        for file in self._open.values():
            os.fsync(file.fileno())
            file.close()
        self._open.clear()


def _load(directory: Path, record_of: Callable[[Document], Record]) -> list[Record]:
    found = []
    for path in directory.glob("*.json"):
        try:
            document: Any = orjson.loads(path.read_bytes())
            found.append(record_of(document))
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.error("%s cannot be read and is left out: %s", path, error)
    return found
