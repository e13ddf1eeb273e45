"""Formats of rows: JSON lines and CSV, read by ranges of bytes; Parquet and Arrow, read by their groups of rows."""

from __future__ import annotations

import abc
import base64
import csv
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from modelserver.errors import InvalidArgumentError, UnsupportedError

Columns = dict[str, Any]
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: bytes `start` to `end` of a text, or the groups of rows of these numbers, and its rows."""

    start: int
    end: int
    num_rows: int


class Row(msgspec.Struct, frozen=True):
    """A row of a piece by its index; `problem` says why it has no columns."""

    index: int
    columns: Columns
    problem: str = ""


class Format(abc.ABC):
    """How files of one kind are cut into pieces, read and written. Methods block."""

    suffix: str

    @abc.abstractmethod
    def pieces(self, path: Path, num_rows: int) -> Iterator[Piece]:
        """The pieces of a file, of about `num_rows` rows. Raises InvalidArgumentError for a file of another format."""

    @abc.abstractmethod
    def rows(self, path: Path, piece: Piece) -> Iterator[Row]:
        """The rows of a piece, in order."""

    @abc.abstractmethod
    def encode(self, rows: Sequence[Columns], types: Mapping[str, Any]) -> bytes:
        """A whole file. `types` are those of outputs, by column: a NumPy datatype, `bytes` or `str`."""


class JsonLines(Format):
    suffix = ".jsonl"

    def pieces(self, path: Path, num_rows: int) -> Iterator[Piece]:
        return _text_pieces(path, num_rows, 0, has_quotes=False)

    def rows(self, path: Path, piece: Piece) -> Iterator[Row]:
        with path.open("rb") as file:
            file.seek(piece.start)
            index, left = 0, piece.end - piece.start
            while left > 0 and (line := file.readline(left)):
                left -= len(line)
                if line.strip():
                    yield _json_row(index, line)
                    index += 1

    def encode(self, rows: Sequence[Columns], types: Mapping[str, Any]) -> bytes:
        del types
        return b"".join(json_line(row) for row in rows)


def json_line(row: Columns) -> bytes:
    """A line of JSON; bytes are base64."""
    return orjson.dumps(row, _plain, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _json_row(index: int, line: bytes) -> Row:
    try:
        columns = orjson.loads(line)
    except ValueError as error:
        return Row(index, {}, f"the line is not JSON: {error}")
    return Row(index, columns) if isinstance(columns, dict) else Row(index, {}, "the line is not an object")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray):  # of a form that orjson does not take
        return value.tolist() if value.ndim else value[()]
    return str(value)


class Csv(Format):
    """With a line of names at the beginning, as RFC 4180 has it. All columns are text when read."""

    suffix = ".csv"

    def pieces(self, path: Path, num_rows: int) -> Iterator[Piece]:
        _, start = _csv_head(path)
        return _text_pieces(path, num_rows, start, has_quotes=True)

    def rows(self, path: Path, piece: Piece) -> Iterator[Row]:
        names, _ = _csv_head(path)
        with path.open("rb") as file:
            file.seek(piece.start)
            lines = _text_lines(file, piece.end - piece.start)
            index = 0
            for cells in csv.reader(lines):
                if not cells:
                    continue
                if len(cells) == len(names):
                    yield Row(index, dict(zip(names, cells, strict=True)))
                else:
                    yield Row(index, {}, f"expected {len(names)} columns, got {len(cells)}")
                index += 1

    def encode(self, rows: Sequence[Columns], types: Mapping[str, Any]) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(names_of(rows) or types)
        names = names_of(rows)
        writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
        return text.getvalue().encode()


def names_of(rows: Sequence[Columns]) -> list[str]:
    """The columns of all rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.ndarray | list | dict | bytes):
        return orjson.dumps(value, _plain, orjson.OPT_SERIALIZE_NUMPY).decode().strip('"')
    if isinstance(value, np.floating):
        return str(value)  # in the digits of its own precision
    return value


def _csv_head(path: Path) -> tuple[list[str], int]:
    """The names of the columns, and where the rows begin."""
    with path.open("rb") as file:
        head = b""
        while line := file.readline():
            head += line
            if head.count(b'"') % 2 == 0:
                break
        names = next(csv.reader(io.StringIO(head.decode("utf-8-sig", "replace"), newline="")), [])
        if not names or len(set(names)) < len(names):
            raise InvalidArgumentError(f"'{path}' needs a first line of names that differ, got {names}")
        return names, file.tell()


def _text_lines(file: Any, left: int) -> Iterator[str]:
    while left > 0 and (line := file.readline(left)):
        left -= len(line)
        yield line.decode(errors="replace")


def _text_pieces(path: Path, num_rows: int, start: int, *, has_quotes: bool) -> Iterator[Piece]:
    """Cut a text behind records; with `has_quotes` a line end within quotes belongs to its record."""
    with path.open("rb") as file:
        file.seek(start)
        position = start
        count, is_open, is_empty = 0, False, True
        for line in file:
            position += len(line)
            is_empty = is_empty and not line.strip()
            if has_quotes and line.count(b'"') % 2:
                is_open = not is_open
            if is_open:
                continue
            count += not is_empty
            is_empty = True
            if count == num_rows:
                yield Piece(start, position, count)
                start, count = position, 0
        if is_open:
            count += 1
        if count:
            yield Piece(start, position, count)


class Arrow(Format):
    """An IPC file; its pieces are its record batches."""

    suffix = ".arrow"

    def pieces(self, path: Path, num_rows: int) -> Iterator[Piece]:
        reader = _arrow_reader(path)
        sizes = (reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
        return _grouped(sizes, num_rows)

    def rows(self, path: Path, piece: Piece) -> Iterator[Row]:
        reader = _arrow_reader(path)
        batches = (reader.get_batch(number) for number in range(piece.start, piece.end))
        return _rows_of(batches)

    def encode(self, rows: Sequence[Columns], types: Mapping[str, Any]) -> bytes:
        table = _table(rows, types)
        sink = io.BytesIO()
        with arrow().ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()


class Parquet(Format):
    """Its pieces are row groups."""

    suffix = ".parquet"

    def pieces(self, path: Path, num_rows: int) -> Iterator[Piece]:
        metadata = _parquet(path).metadata
        sizes = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        return _grouped(sizes, num_rows)

    def rows(self, path: Path, piece: Piece) -> Iterator[Row]:
        groups = list(range(piece.start, piece.end))
        return _rows_of(_parquet(path).iter_batches(batch_size=256, row_groups=groups))

    def encode(self, rows: Sequence[Columns], types: Mapping[str, Any]) -> bytes:
        sink = io.BytesIO()
        arrow("pyarrow.parquet").write_table(_table(rows, types), sink)
        return sink.getvalue()


def arrow(module: str = "pyarrow") -> Any:
    """The library, or one of its modules. Raises UnsupportedError if it is not installed."""
    try:
        importlib.import_module("pyarrow.ipc")
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"Parquet and Arrow need pyarrow: pip install 'modelserver-py[batch]' ({error})"
        ) from None


def _opened(path: Path, what: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (arrow().ArrowException, OSError) as error:
        raise InvalidArgumentError(f"'{path}' is not {what}: {error}") from None


def _parquet(path: Path) -> Any:
    library = arrow("pyarrow.parquet")
    return _opened(path, "a Parquet file", lambda: library.ParquetFile(path))


def _arrow_reader(path: Path) -> Any:
    library = arrow()
    return _opened(path, "an Arrow file", lambda: library.ipc.open_file(library.memory_map(str(path))))


def _grouped(sizes: Iterable[int], num_rows: int) -> Iterator[Piece]:
    """Neighbouring groups, as many as make up `num_rows`."""
    start = count = end = 0
    for number, size in enumerate(sizes):
        if count and count + size > num_rows:
            yield Piece(start, number, count)
            start, count = number, 0
        count += size
        end = number + 1
    if count:
        yield Piece(start, end, count)


def _rows_of(batches: Iterable[Any]) -> Iterator[Row]:
    index = 0
    for batch in batches:
        for columns in batch.to_pylist():
            yield Row(index, columns)
            index += 1


def _table(rows: Sequence[Columns], types: Mapping[str, Any]) -> Any:
    library = arrow()
    arrays = {}
    for name in names_of(rows) or types:
        values = [row.get(name) for row in rows]
        arrays[name] = _arrow_array(library, values, types.get(name))
    return library.table(arrays)


def _arrow_array(library: Any, values: list[Any], dtype: Any) -> Any:
    """A column of an input, whose type is that of its values, or of an output, whose type is known."""
    if dtype is None:
        return library.array(values)
    if dtype in (bytes, str):
        kind = library.binary() if dtype is bytes else library.string()
    else:
        kind = library.from_numpy_dtype(dtype)
    first = next((value for value in values if value is not None), None)
    for _ in range(_depth(first)):
        kind = library.list_(kind)
    return library.array([_for_arrow(value) for value in values], kind)


def _depth(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.ndim
    return 1 + _depth(value[0] if value else None) if isinstance(value, list) else 0


def _for_arrow(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return value.tolist() if value.ndim else value[()]
    return value


FORMATS: dict[str, Format] = {
    "jsonl": JsonLines(),
    "csv": Csv(),
    "parquet": Parquet(),
    "arrow": Arrow(),
}
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
SUFFIXES = tuple(_SUFFIXES)


def format_of(name: str) -> str:
    """The name of a file's format, by its suffix. Raises InvalidArgumentError for another one."""
    suffix = "." + name.rpartition(".")[2].lower()
    if suffix not in _SUFFIXES:
        raise InvalidArgumentError(f"'{name}' has none of the suffixes {', '.join(SUFFIXES)}")
    return _SUFFIXES[suffix]
