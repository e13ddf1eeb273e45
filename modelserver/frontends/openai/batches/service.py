"""Files and batches of all callers: what a client asks of them, and their life from start to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.core import Metric

from modelserver.auth.api_keys import KeyRing, caller_name
from modelserver.core.tensor import Buffer
from modelserver.errors import NotFoundError, PayloadTooLargeError
from modelserver.frontends.http.framing import SSE_DONE
from modelserver.frontends.llm.edge import CallEdge
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.openai.batches.records import (
    BatchRecord,
    BatchStatus,
    FileRecord,
    RowCounts,
    batch_families,
    new_id,
)
from modelserver.frontends.openai.batches.runner import BatchRun, Handler, RunnerParts, Stop, Turns
from modelserver.frontends.openai.batches.storage import ERRORS, OUTPUT, BatchStorage
from modelserver.frontends.openai.chat import Chat
from modelserver.frontends.openai.classifying import Classifying
from modelserver.frontends.openai.completions import Completions
from modelserver.frontends.openai.embeddings import Embeddings
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.frontends.openai.ranking import Ranking
from modelserver.frontends.openai.responses.routes import Responses
from modelserver.planes.authorized import AnyDataPlane
from modelserver.planes.data import DataPlane
from modelserver.protocol.limits import HttpLimits

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Record = TypeVar("Record", FileRecord, BatchRecord)

BATCH, BATCH_OUTPUT = "batch", "batch_output"
_WINDOW_S = 24 * 3600
# Files, and batches that have ended, are removed after this time unless the client names another.
LIFETIME_S = 30 * 24 * 3600
_MAX_ACTIVE = 64
_TICK_S = 1.0


def endpoint_handlers(dataplane: AnyDataPlane, limits: HttpLimits) -> dict[str, Handler]:
    """The handlers of the endpoints that a batch may name, as those of their routes."""
    edge = CallEdge(dataplane, limits, errors=OpenAiErrors(), framing=SSE_DONE)
    serves = {
        "/v1/chat/completions": Chat(dataplane).serve,
        "/v1/completions": Completions(dataplane).serve,
        "/v1/embeddings": Embeddings(dataplane).serve,
        "/v1/responses": Responses(dataplane, limits).create,
        "/v1/moderations": Classifying(dataplane).moderate,
        "/v1/rerank": Ranking(dataplane).rerank,
        "/v1/score": Ranking(dataplane).score,
    }
    return {path: edge.handler(serve) for path, serve in serves.items()}


class BatchService:
    """Event loop thread only. A file or a batch is seen only by the key that made it."""

    def __init__(
        self,
        directory: Path,
        dataplane: DataPlane,
        handlers: dict[str, Handler],
        keys: KeyRing | None = None,
        *,
        concurrency: int = 64,
        max_bytes: int = 1 << 40,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """At most `concurrency` lines run at a time. The files of each key have at most `max_bytes` together."""
        self._directory = directory
        self._handlers = handlers
        self._keys = keys
        self._max_bytes = max_bytes
        self._clock = clock
        self._files: dict[str, FileRecord] = {}
        self._batches: dict[str, BatchRecord] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="batch-files")
        # Set when models are loaded, and when the service stops.
        self._may_run = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._storage: BatchStorage | None = None
        self._turns = Turns(dataplane, concurrency)
        self._written = RowCounts()
        self._is_stopped = False

    async def open(self) -> None:
        """Read what was kept. Raises InvalidArgumentError for a directory that cannot be used."""
        self._storage = await self._in_thread(partial(BatchStorage, self._directory))
        files, batches = await self._in_thread(self._storage.load)
        self._files = {record.id: record for record in files}
        self._batches = {record.id: record for record in batches}
        self._parts = RunnerParts(
            storage=self._storage,
            pool=self._pool,
            turns=self._turns,
            handlers=self._handlers,
            keys=self._keys,
            now_s=self._now_s,
            written=self._written,
        )

    def resume(self) -> None:
        """Go on with the batches that have not ended, now that models are loaded."""
        self._may_run.set()
        for record in sorted(self._batches.values(), key=lambda each: each.created_s):
            if not record.status.is_final and record.id not in self._runs:
                self._begin(record)
        self._watcher = self._add_task(self._watch())

    async def stop(self) -> None:
        """Send no more lines. Those that run are ended, and sent again by the next server that uses the directory."""
        self._is_stopped = True
        for run in self._runs.values():
            run.stop(Stop.SERVER)
        self._may_run.set()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Stop, and let another server use the directory."""
        await self.stop()
        storage, self._storage = self._storage, None
        if storage is not None:
            await self._in_thread(storage.close)
        self._pool.shutdown(wait=False)

    # Files.

    async def add_file(self, filename: str, purpose: str, data: Buffer, lifetime_s: int | None) -> FileRecord:
        """Keep a file. Raises PayloadTooLargeError where the caller has no room for it."""
        owner = caller_name()
        num_kept = sum(each.num_bytes for each in self._files.values() if each.owner == owner)
        if num_kept + len(data) > self._max_bytes:
            raise PayloadTooLargeError(
                f"the file has {len(data)} bytes, and your files {num_kept}: at most {self._max_bytes} are kept for a "
                "key (--batch-max-bytes); delete some"
            )
        now_s = self._now_s()
        record = FileRecord(
            id=new_id("file-"),
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=len(data),
            created_s=now_s,
            expires_s=now_s + (lifetime_s or LIFETIME_S),
        )
        # Counted at once, so that uploads at the same time find no more room than there is.
        self._files[record.id] = record
        try:
            await self._in_thread(partial(self._opened.add_file, record, data))
        except BaseException:
            del self._files[record.id]
            await self._in_thread(partial(self._opened.remove_file, record.id))
            raise
        return record

    def files(self) -> list[FileRecord]:
        """The caller's files."""
        return [each for each in self._files.values() if each.owner == caller_name()]

    def file(self, file_id: str) -> FileRecord:
        """Raises NotFoundError for a file that is not the caller's."""
        return _owned(self._files, file_id, "file")

    async def content(self, file_id: str) -> Buffer:
        """What is in a file, mapped into memory. Raises as `file`."""
        self.file(file_id)
        return memoryview(await self._in_thread(partial(self._opened.data, file_id)))

    async def remove_file(self, file_id: str) -> None:
        """Raises as `file`, and ParameterError for a file that a batch still reads."""
        self.file(file_id)
        reader = next((each for each in self._active() if each.input_file_id == file_id), None)
        if reader is not None:
            raise ParameterError(f"the file is in use by the batch {reader.id}: cancel that first", "file_id")
        await self._drop_file(file_id)

    # Batches.

    async def add_batch(
        self, endpoint: str, input_file_id: str, metadata: dict[str, str] | None, output_lifetime_s: int | None
    ) -> BatchRecord:
        """Begin a batch. Raises ParameterError for a file that is not a batch's, or not the caller's."""
        owner = caller_name()
        file = self._files.get(input_file_id)
        if file is None or file.owner != owner:
            raise ParameterError(f"there is no file '{input_file_id:.100}'", "input_file_id")
        if file.purpose != BATCH:
            raise ParameterError(f"the file's purpose is {file.purpose}, and must be {BATCH}", "input_file_id")
        if sum(each.owner == owner for each in self._active()) >= _MAX_ACTIVE:
            raise ParameterError(f"{_MAX_ACTIVE} of your batches have not ended yet: wait, or cancel some", None)
        now_s = self._now_s()
        record = BatchRecord(
            id=new_id("batch_"),
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            metadata=metadata,
            created_s=now_s,
            expires_s=now_s + _WINDOW_S,
            output_lifetime_s=output_lifetime_s or LIFETIME_S,
        )
        await self._in_thread(partial(self._opened.save_batch, record))
        self._batches[record.id] = record
        self._begin(record)
        return record

    def batches(self) -> list[BatchRecord]:
        """The caller's batches."""
        return [each for each in self._batches.values() if each.owner == caller_name()]

    def batch(self, batch_id: str) -> BatchRecord:
        """Raises NotFoundError for a batch that is not the caller's."""
        return _owned(self._batches, batch_id, "batch")

    async def cancel(self, batch_id: str) -> BatchRecord:
        """End a batch early; what is answered is kept. Raises as `batch`, and ParameterError for one that has ended."""
        record = self.batch(batch_id)
        if record.status is BatchStatus.CANCELLING:
            return record
        if record.status.is_final or record.final is not None:
            raise ParameterError(f"the batch cannot be cancelled: its status is {record.status}", "batch_id")
        record.enter(BatchStatus.CANCELLING, self._now_s())
        await self._in_thread(partial(self._opened.save_batch, record))
        if (run := self._runs.get(batch_id)) is not None:
            run.stop(Stop.CANCELLED)
        return record

    def families(self) -> list[Metric]:
        """The metrics of all callers' batches."""
        return batch_families(self._batches.values(), self._written, self._turns.num_running)

    # Life.

    @property
    def _opened(self) -> BatchStorage:
        assert self._storage is not None, "open comes first"
        return self._storage

    def _active(self) -> Iterable[BatchRecord]:
        return (each for each in self._batches.values() if not each.status.is_final)

    def _begin(self, record: BatchRecord) -> None:
        """Run a batch, unless the server stops: then the next one does."""
        if self._is_stopped:
            return
        run = BatchRun(record, self._parts)
        self._runs[record.id] = run
        self._add_task(self._run(run))

    async def _run(self, run: BatchRun) -> None:
        record = run.record
        try:
            await self._may_run.wait()
            await run.run()
            if record.final is not None:
                await self._publish(record)
        except Exception as error:
            logger.error("batch %s failed", record.id, exc_info=error)
            message = f"the server could not go on ({type(error).__name__})"
            record.errors.append({"code": "server_error", "message": message, "line": None, "param": None})
            record.final = BatchStatus.FAILED
            try:
                await self._publish(record)
            except OSError as cause:
                logger.error("batch %s cannot be kept: %s", record.id, cause)
                record.enter(BatchStatus.FAILED, self._now_s())
        finally:
            del self._runs[record.id]

    async def _publish(self, record: BatchRecord) -> None:
        """Make files of the rows, and end the batch. May be repeated."""
        storage, now_s = self._opened, self._now_s()
        assert record.final is not None, "all rows are written"
        names = {OUTPUT: record.output_file_id, ERRORS: record.error_file_id}
        for kind in names:
            if names[kind] is None and await self._in_thread(partial(storage.has_rows, record.id, kind)):
                names[kind] = new_id("file-")
        record.output_file_id, record.error_file_id = names[OUTPUT], names[ERRORS]
        await self._in_thread(partial(storage.save_batch, record))
        for kind, file_id in names.items():
            if file_id is not None and file_id not in self._files:
                file = FileRecord(
                    id=file_id,
                    owner=record.owner,
                    filename=f"{record.id}_{'output' if kind == OUTPUT else 'error'}.jsonl",
                    purpose=BATCH_OUTPUT,
                    num_bytes=0,
                    created_s=now_s,
                    expires_s=now_s + record.output_lifetime_s,
                )
                await self._in_thread(partial(storage.publish, record.id, kind, file))
                self._files[file_id] = file
        record.enter(record.final, now_s)
        await self._in_thread(partial(storage.save_batch, record))
        logger.info(
            "batch %s is %s: %d of %d requests answered, %d failed",
            record.id,
            record.status,
            record.num_completed,
            record.num_total,
            record.num_failed,
        )

    async def _watch(self) -> None:
        """End what expires, until the service stops."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.expire()
            except OSError as error:
                logger.error("files that expired cannot be removed: %s", error)

    async def expire(self) -> None:
        """End batches whose time is over; remove files, and batches that ended, whose time is over."""
        now_s = self._now_s()
        for batch_id, run in self._runs.items():
            record = self._batches[batch_id]
            if record.final is None and record.status is not BatchStatus.CANCELLING and record.expires_s <= now_s:
                run.stop(Stop.EXPIRED)
        in_use = {each.input_file_id for each in self._active()}
        for file in list(self._files.values()):
            if file.expires_s is not None and file.expires_s <= now_s and file.id not in in_use:
                await self._drop_file(file.id)
        for record in list(self._batches.values()):
            if record.status.is_final and record.created_s + LIFETIME_S + _WINDOW_S <= now_s:
                del self._batches[record.id]
                await self._in_thread(partial(self._opened.remove_batch, record.id))

    async def _drop_file(self, file_id: str) -> None:
        del self._files[file_id]
        await self._in_thread(partial(self._opened.remove_file, file_id))

    def _now_s(self) -> int:
        return int(self._clock())

    def _add_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="batch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _owned(records: dict[str, Record], record_id: str, what: str) -> Record:
    record = records.get(record_id)
    if record is None or record.owner != caller_name():
        raise NotFoundError(f"there is no {what} '{record_id:.100}'")
    return record
