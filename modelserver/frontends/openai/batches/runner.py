"""Runs batches: sends the lines of their files beside live traffic, and writes a row for each answer."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson

from modelserver.auth.api_keys import CALLER, ApiKey, KeyRing
from modelserver.errors import ServerError, UnauthenticatedError
from modelserver.frontends.openai.batches.input_file import InputFile, InputFileError, Line
from modelserver.frontends.openai.batches.records import BatchRecord, BatchStatus, RowCounts, new_id
from modelserver.frontends.openai.batches.storage import ERRORS, OUTPUT, BatchStorage, RowLog
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.planes.data import DataPlane
from modelserver.protocol.exchange import HttpExchange, HttpHead, HttpResponse, ResponseWriter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Handler = Callable[[HttpExchange], None]

# A line that is refused because the server has too much to do is sent again, after longer and longer pauses. One that
# finds the model not ready is given up in the end.
_OVERLOADED, _NOT_READY = (429,), (499, 503)
_MAX_ATTEMPTS_NOT_READY = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
# How often a model is looked at that others use, and the share of lines that run beside them.
_LOOK_S = 0.05
_SHARE_BESIDE_OTHERS = 8


class Stop(enum.Enum):
    """Why a batch stops before its last line."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    # The server stops; the next one goes on.
    SERVER = "server"


class LineExchange(HttpExchange):
    """A request of a batch, and a future of its answer. Its handler reads it as it reads any client's."""

    __slots__ = ("answer",)

    is_background = True

    def __init__(self, path: str, body: bytes) -> None:
        self.head = HttpHead("POST", path, {"content-type": "application/json"})
        self.body = body
        self.on_disconnect = None
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def respond(self, response: HttpResponse) -> None:
        if not self.answer.done():
            self.answer.set_result((response.status, b"".join(map(bytes, response.body))))

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:  # noqa: ARG002  # as it is declared
        raise AssertionError("lines that ask for streams are refused before")

    def leave(self) -> None:
        """End what was begun for it."""
        if self.on_disconnect is not None:
            self.on_disconnect()


class Turns:
    """Lets lines of all batches begin, up to a limit at a time, and few while others ask the same model."""

    def __init__(self, dataplane: DataPlane, concurrency: int) -> None:
        self._dataplane = dataplane
        self._concurrency = concurrency
        self._free = asyncio.Semaphore(concurrency)
        self._running: Counter[str] = Counter()

    async def take(self, model: str) -> None:
        """Return when a line for that model may be sent; `give_back` ends it."""
        await self._free.acquire()
        try:
            while self._is_busy(model):  # noqa: ASYNC110 - models have no event for it
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            self._free.release()
            raise
        self._running[model] += 1

    @property
    def num_running(self) -> int:
        """Lines of all batches that have begun."""
        return self._running.total()

    def give_back(self, model: str) -> None:
        self._running[model] -= 1
        self._free.release()

    def _is_busy(self, model: str) -> bool:
        """Whether others wait for the model, or use it while a share of the lines runs already."""
        num_running = self._running[model]
        if not model or not num_running:
            return False
        try:
            load = self._dataplane.load_of(model)
        except ServerError:  # it is not loaded
            return False
        has_others = load.num_inflight > num_running
        return has_others and num_running >= max(1, self._concurrency // _SHARE_BESIDE_OTHERS)


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What all batches share. `now_s` is the time since 1970; `handlers` belong to the endpoints. Without `keys` all
    callers are the same."""

    storage: BatchStorage
    pool: Executor
    turns: Turns
    handlers: Mapping[str, Handler]
    keys: KeyRing | None
    now_s: Callable[[], int]
    written: RowCounts


class BatchRun:
    """One batch on its way. Event loop thread only."""

    def __init__(self, record: BatchRecord, parts: RunnerParts) -> None:
        self.record = record
        self._parts = parts
        self._stop: Stop | None = Stop.CANCELLED if record.status is BatchStatus.CANCELLING else None
        self._waiting: asyncio.Task[None] | None = None
        self._written: set[str] = set()
        self._lines: set[asyncio.Task[None]] = set()
        self._rows: RowLog | None = None
        self._error: OSError | None = None

    def stop(self, reason: Stop) -> None:
        """End the lines that run, and send no more. `run` writes what there is, unless the server stops."""
        if self._stop is not None:
            return
        self._stop = reason
        if self._waiting is not None:
            self._waiting.cancel()
        for task in self._lines:
            task.cancel()

    async def run(self) -> None:
        """Send all lines that have no row yet. On return `record.final` is set, or the server stops.

        Raises OSError where rows cannot be written.
        """
        record = self.record
        if record.final is not None:
            return
        try:
            file = await self._read()
        except InputFileError as error:
            record.errors = error.errors
            await self._end(BatchStatus.FAILED)
            return
        self._rows = self._parts.storage.open_rows(record.id)
        try:
            done = await self._in_thread(self._recover)
            lines = [line for line in file.lines if line.custom_id not in done]
            await self._begin(file, len(lines))
            await self._send(file, lines)
            if self._error is not None:
                raise self._error
            if self._stop is Stop.SERVER:
                return
            if self._stop is Stop.EXPIRED:
                await self._expire([line for line in lines if line.custom_id not in self._written])
        finally:
            await self._in_thread(self._rows.close)
        ends = {Stop.CANCELLED: BatchStatus.CANCELLED, Stop.EXPIRED: BatchStatus.EXPIRED, None: BatchStatus.COMPLETED}
        await self._end(ends[self._stop])

    async def _read(self) -> InputFile:
        storage, record = self._parts.storage, self.record

        def read() -> InputFile:
            try:
                return InputFile(storage.data(record.input_file_id), record.endpoint)
            except OSError:
                message = f"the file {record.input_file_id} is not there any more"
                raise InputFileError(
                    [{"code": "file_not_found", "message": message, "line": None, "param": "input_file_id"}]
                ) from None

        return await self._in_thread(read)

    def _recover(self) -> set[str]:
        """The names of lines that have a row, which are counted anew. Called in a thread, before the first line."""
        assert self._rows is not None, "they are open"
        record = self.record
        record.num_completed = record.num_failed = 0
        record.usage = type(record.usage)()
        done = set()
        for kind, row in self._rows.recover():
            done.add(row["custom_id"])
            self._count(kind, row["response"])
        return done

    async def _begin(self, file: InputFile, num_left: int) -> None:
        record = self.record
        record.num_total = len(file.lines)
        record.model = record.model or next((line.model for line in file.lines if line.model), None)
        if record.status is BatchStatus.VALIDATING:
            record.enter(BatchStatus.IN_PROGRESS, self._parts.now_s())
            logger.info("batch %s: %d requests to %s", record.id, record.num_total, record.endpoint)
        else:
            logger.info("batch %s goes on: %d of %d requests are left", record.id, num_left, record.num_total)
        await self._save()

    async def _send(self, file: InputFile, lines: list[Line]) -> None:
        """Send the lines, and return when none runs any more."""
        turns = self._parts.turns
        for line in lines:
            if not self._may_send():
                break
            self._waiting = asyncio.ensure_future(turns.take(line.model or ""))
            try:
                await self._waiting
            except asyncio.CancelledError:
                if self._may_send():
                    raise  # this task itself is cancelled
                break
            finally:
                self._waiting = None
            task = asyncio.create_task(self._run_line(file, line), name=f"{self.record.id} {line.custom_id:.40}")
            self._lines.add(task)
            task.add_done_callback(partial(self._end_line, line))
            if not self._may_send():  # any more, since the turn was given
                task.cancel()
        while self._lines:
            await asyncio.wait(self._lines)

    def _may_send(self) -> bool:
        return self._stop is None and self._error is None

    async def _run_line(self, file: InputFile, line: Line) -> None:
        try:
            try:
                status, body = await self._ask(file.body(line))
            except UnauthenticatedError as error:
                refused = OpenAiErrors().failed(error)
                status, body = refused.status, b"".join(map(bytes, refused.body))
            await self._write(line, status, body)
        except asyncio.CancelledError:
            pass  # the batch stops
        except OSError as error:
            self._error = error

    def _end_line(self, line: Line, task: asyncio.Task[None]) -> None:
        self._lines.discard(task)
        self._parts.turns.give_back(line.model or "")
        if not task.cancelled() and task.exception() is not None:
            logger.error("batch %s: %r failed unexpectedly", self.record.id, line.custom_id, exc_info=task.exception())

    async def _ask(self, body: bytes) -> tuple[int, bytes]:
        """The status and the document that the server answers, after further attempts where these may help."""
        pause_s, num_attempts = _FIRST_PAUSE_S, 0
        while True:
            exchange = LineExchange(self.record.endpoint, body)
            token = CALLER.set(self._caller())
            try:
                self._parts.handlers[self.record.endpoint](exchange)
            finally:
                CALLER.reset(token)
            try:
                status, document = await exchange.answer
            finally:
                exchange.leave()
            num_attempts += 1
            is_given_up = status in _NOT_READY and num_attempts == _MAX_ATTEMPTS_NOT_READY
            if status not in _OVERLOADED + _NOT_READY or is_given_up:
                return status, document
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _caller(self) -> ApiKey | None:
        """The batch's key as it is now. Raises UnauthenticatedError for one that was revoked."""
        keys, owner = self._parts.keys, self.record.owner
        if keys is None:
            return None
        key = keys.named(owner)
        if key is None:
            raise UnauthenticatedError(f"the API key '{owner}' does not exist any more")
        return key

    async def _write(self, line: Line, status: int, body: bytes) -> None:
        """Write the row of an answer. Once begun, it is written and counted, also if the batch stops."""
        assert self._rows is not None, "they are open"
        kind = OUTPUT if status == 200 else ERRORS
        head = {"id": new_id("batch_req_"), "custom_id": line.custom_id, "error": None}
        response = orjson.dumps({"status_code": status, "request_id": new_id("req_")})
        row = b'%s,"response":%s,"body":%s}}\n' % (orjson.dumps(head)[:-1], response[:-1], body or b"null")
        writing = asyncio.ensure_future(self._in_thread(partial(self._rows.append, kind, [row])))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
        self._written.add(line.custom_id)
        if kind == OUTPUT:
            self._parts.written.num_completed += 1
        else:
            self._parts.written.num_failed += 1
        self._count(kind, {"body": orjson.loads(body) if kind == OUTPUT else None})

    async def _expire(self, lines: list[Line]) -> None:
        """Write a row for each line that was not answered in time."""
        assert self._rows is not None, "they are open"
        error = {"code": "batch_expired", "message": "This request could not be executed before the batch expired."}
        rows = [
            orjson.dumps({"id": new_id("batch_req_"), "custom_id": line.custom_id, "response": None, "error": error})
            + b"\n"
            for line in lines
        ]
        await self._in_thread(partial(self._rows.append, ERRORS, rows))
        self.record.num_failed += len(rows)
        self._parts.written.num_failed += len(rows)

    def _count(self, kind: str, response: Mapping[str, Any] | None) -> None:
        record = self.record
        if kind == ERRORS:
            record.num_failed += 1
            return
        record.num_completed += 1
        usage = None if response is None else response["body"].get("usage")
        if isinstance(usage, dict):
            record.usage.add(usage)

    async def _end(self, final: BatchStatus) -> None:
        """All rows are written: from now on the batch ends like this, also after a kill."""
        record, now_s = self.record, self._parts.now_s()
        record.final = final
        if final in (BatchStatus.COMPLETED, BatchStatus.EXPIRED):
            record.enter(BatchStatus.FINALIZING, now_s)
        await self._save()

    async def _save(self) -> None:
        await self._in_thread(partial(self._parts.storage.save_batch, self.record))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._parts.pool, work)
