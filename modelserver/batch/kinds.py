"""What a row is: columns that are a model's inputs, or a request in OpenAI's shape."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from modelserver.batch.columns import Array, ColumnMap
from modelserver.batch.formats import Columns, Format, Row, json_line
from modelserver.batch.job import Record
from modelserver.batch.targets import RefusedError, Session
from modelserver.errors import InvalidArgumentError

# Codes of records that no server has answered.
INVALID_ROW = "invalid_row"


class RowKind(abc.ABC):
    """How rows become requests, and answers become rows of a part. `prepared` rows are what `prepare` has made."""

    # Whether the server executes rows of several requests together, so that one may fail for another's fault.
    shares_batches = False
    # How many rows the server takes in one request.
    max_rows = 1

    @abc.abstractmethod
    def prepare(self, columns: Columns) -> Any:
        """What is sent of a row. Raises InvalidArgumentError."""

    def may_join(self, one: Any, other: Any) -> bool:
        """Whether two prepared rows fit into one request."""
        del one, other
        return False

    def num_bytes(self, prepared: Any) -> int:
        """How large a row is in a request, where rows may join."""
        del prepared
        return 0

    @abc.abstractmethod
    async def ask(self, session: Session, prepared: Sequence[Any]) -> Sequence[Any]:
        """The value of each row's record. Raises RefusedError."""

    @abc.abstractmethod
    def refused(self, index: int, error: RefusedError, num_attempts: int) -> Record:
        """The record of a row that the server has refused for good."""

    @abc.abstractmethod
    def output_row(self, name: str, number: int, row: Row, record: Record) -> Columns:
        """A row of the part. `number` is that of the row in the file of that name, from 0."""

    @abc.abstractmethod
    def error_row(self, name: str, number: int, row: Row, record: Record) -> Columns:
        """A line of the file of errors."""

    @abc.abstractmethod
    def encode(self, rows: Sequence[Columns]) -> bytes:
        """The part."""


class ColumnRows(RowKind):
    """The columns of a row are inputs of the model; its outputs are added to them."""

    def __init__(self, columns: ColumnMap, output: Format) -> None:
        self._columns = columns
        self._output = output
        self.shares_batches = columns.model.is_batched
        self.max_rows = max(1, columns.model.max_batch_size)

    def prepare(self, columns: Columns) -> dict[str, Array]:
        return self._columns.inputs_of(columns)

    def may_join(self, one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
        if not self._columns.model.is_batched or one.keys() != other.keys():
            return False
        for name, array in one.items():  # noqa: SIM110 - a third of the time of `all`, for each row
            if array.shape != other[name].shape:
                return False
        return True

    def num_bytes(self, prepared: Mapping[str, Array]) -> int:
        return sum(sum(map(len, each.flat)) if each.dtype.hasobject else each.nbytes for each in prepared.values())

    async def ask(self, session: Session, prepared: Sequence[Mapping[str, Array]]) -> Sequence[Columns]:
        outputs = await session.infer(self._columns.model, self._columns.tensors(prepared))
        try:
            return self._columns.outputs_of(outputs, len(prepared))
        except InvalidArgumentError as error:
            raise RefusedError(422, error.message) from None

    def refused(self, index: int, error: RefusedError, num_attempts: int) -> Record:
        return Record(index, error.message, str(error.status), num_attempts)

    def output_row(self, name: str, number: int, row: Row, record: Record) -> Columns:
        del name, number
        return {**self._columns.kept(row.columns), **record.value}

    def error_row(self, name: str, number: int, row: Row, record: Record) -> Columns:
        error = {"code": record.code, "message": record.value, "attempts": record.num_attempts}
        return {"file": name, "row": number, "error": error, "columns": row.columns}

    def encode(self, rows: Sequence[Columns]) -> bytes:
        return self._output.encode(rows, self._columns.types)


class RequestRows(RowKind):
    """A row is a request: `custom_id`, `method`, `url` and `body`; its answer is OpenAI's."""

    def prepare(self, columns: Columns) -> tuple[str, bytes]:
        for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
            if not isinstance(columns.get(name), kind):
                raise InvalidArgumentError(f"'{name}' must be {'an object' if kind is dict else 'a text'}")
        if columns.get("method", "POST") != "POST":
            raise InvalidArgumentError(f"'method' must be POST, got {columns['method']!r:.40}")
        if not columns["url"].startswith("/"):
            raise InvalidArgumentError(f"'url' must be a path such as /v1/chat/completions, got {columns['url']:.80}")
        if columns["body"].get("stream"):
            raise InvalidArgumentError("answers of a batch are whole: leave 'stream' out")
        return columns["url"], orjson.dumps(columns["body"])

    async def ask(self, session: Session, prepared: Sequence[tuple[str, bytes]]) -> Sequence[bytes]:
        return [await session.call(path, body) for path, body in prepared]

    def refused(self, index: int, error: RefusedError, num_attempts: int) -> Record:
        return Record(index, error.body, str(error.status), num_attempts)

    def output_row(self, name: str, number: int, row: Row, record: Record) -> Columns:
        return _answer_row(name, number, row, 200, record.value)

    def error_row(self, name: str, number: int, row: Row, record: Record) -> Columns:
        if record.code != INVALID_ROW:
            return _answer_row(name, number, row, int(record.code), record.value)
        error = {"code": record.code, "message": record.value, "file": name, "line": number + 1}
        return {**_row_head(name, number, row), "response": None, "error": error}

    def encode(self, rows: Sequence[Columns]) -> bytes:
        return b"".join(map(json_line, rows))


def _row_head(name: str, number: int, row: Row) -> Columns:
    custom_id = row.columns.get("custom_id")
    return {"id": f"batch_req_{_id(name, number)}", "custom_id": custom_id}


def _answer_row(name: str, number: int, row: Row, status: int, body: bytes) -> Columns:
    try:
        orjson.loads(body)
    except ValueError:
        body = orjson.dumps(body.decode(errors="replace"))  # a proxy's page
    response = {"status_code": status, "request_id": f"req_{_id(name, number)}", "body": orjson.Fragment(body)}
    return {**_row_head(name, number, row), "response": response, "error": None}


def _id(name: str, number: int) -> str:
    """The same for the same row, whichever worker writes it."""
    return hashlib.sha256(f"{name}:{number}".encode()).hexdigest()[:32]
