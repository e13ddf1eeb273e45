"""Runs a job: takes shards, sends their rows, keeps the answers, publishes whole parts, and stops in order."""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from modelserver.batch.concurrency import Concurrency
from modelserver.batch.formats import Columns, Format, Row, json_line
from modelserver.batch.job import Claim, Counts, Job, Record
from modelserver.batch.kinds import INVALID_ROW, RowKind
from modelserver.batch.places import InputFile
from modelserver.batch.targets import UNREACHABLE, RefusedError, Session, Target
from modelserver.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_SLICE_ROWS = 256
# Of a request where --batch-size gives no number.
_MAX_ROWS, _MAX_BYTES = 64, 1 << 20
_UNITS_AHEAD = 64
_LONGEST_WAIT_FOR_OTHERS_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
# Refusals for which a request is sent again: the server has too much to do, the model is not ready, a proxy gave up.
_OVERLOADED = 429
_PASSING = (499, 502, 503, 504)
_MAX_PASSING = 8
_MAX_FAILED = 3
_INVALID = 400


class Ending(enum.Enum):
    """How a run ended."""

    COMPLETED = "completed"  # the job, all its shards
    SHARE_DONE = "share_done"  # this worker's shards; others are left
    STOPPED = "stopped"  # by a signal; to be continued
    UNREACHABLE = "unreachable"  # the server did not answer for too long; to be continued
    TOO_MANY_FAILED = "too_many_failed"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`max_failed` 0 is no bound. `patience_s`: how long a server may be out of reach. `rows_per_request` 0: as many as
    the model takes, up to 64, while they are small."""

    rows_per_request: int = 0
    flush_s: float = 5.0
    grace_s: float = 20.0
    patience_s: float = 300.0
    max_failed: int = 0


@dataclass(eq=False)
class ShardRun:
    """A shard on its way. `records` are those of all rows that are answered, `pending` those that are not kept yet."""

    claim: Claim
    num_rows: int
    records: dict[int, Record]
    pending: list[Record] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # It is whole, and being published; or another worker has taken it.
    is_ending: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows of one request, by their indexes, as they were prepared."""

    shard: ShardRun
    indexes: list[int]
    prepared: list[Any]


class Run:
    """One worker's part in a job. Used once, in an event loop."""

    def __init__(
        self,
        job: Job,
        target: Target,
        kind: RowKind,
        source: Format,
        concurrency: Concurrency,
        options: RunOptions,
        scope: Sequence[int],
    ) -> None:
        self._job = job
        self._target = target
        self._kind = kind
        self._source = source
        self._concurrency = concurrency
        self._options = options
        self._scope = scope
        self._units: deque[Unit] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._has_room = asyncio.Event()
        self._active: dict[int, ShardRun] = {}
        # Their number changes where one decides to end, and the set later.
        self._slots: set[asyncio.Task[None]] = set()
        self._num_slots = 0
        self._publishing: set[asyncio.Task[None]] = set()
        self._has_published = asyncio.Event()
        self._gate = _Gate()
        self._files = _LocalFiles(job)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="batch")
        self._stopping = asyncio.Event()
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._answered_s = 0.0
        # Rows of this run, and rows of its shards that an earlier one had answered.
        self.num_answered = 0
        self.num_failed = 0
        self.num_recovered = 0

    @property
    def num_rows_done(self) -> int:
        """Rows of the job that are answered, as far as this worker knows."""
        return self._job.num_rows_done + sum(len(shard.records) for shard in self._active.values())

    @property
    def limit(self) -> int:
        """Requests that may be in flight."""
        return self._concurrency.limit

    def stop(self, ending: Ending = Ending.STOPPED) -> None:
        """Take no more rows; what is in flight has the grace to be answered. Ends it at once when called again."""
        if self._stopping.is_set():
            for task in self._slots:
                task.cancel()
        self._ending = self._ending or ending
        self._stopping.set()
        self._wake_all()

    async def run(self) -> Ending:
        """Work until all shards are done, or until it is stopped.

        Raises OSError or a ServerError if files cannot be read or written; what is answered is kept then, too.
        """
        self._answered_s = asyncio.get_running_loop().time()
        stopping = asyncio.create_task(self._stopping.wait())
        feeder, keeper = asyncio.create_task(self._feed()), asyncio.create_task(self._keep())
        try:
            await asyncio.wait((feeder, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set() and self._slots:
                await asyncio.wait(self._slots, timeout=self._options.grace_s)
        finally:
            for task in (stopping, feeder, keeper, *self._slots):
                task.cancel()
            await asyncio.gather(stopping, feeder, keeper, *self._slots, return_exceptions=True)
            await self._leave()
        if self._error is None and not feeder.cancelled():
            self._error = feeder.exception()
        if self._error is not None:
            raise self._error
        if self._ending is not None:
            return self._ending
        is_completed = await asyncio.to_thread(self._job.finish)
        return Ending.COMPLETED if is_completed else Ending.SHARE_DONE

    async def _leave(self) -> None:
        """Keep what is answered, and let others have the shards."""
        await asyncio.gather(*self._publishing, return_exceptions=True)
        try:
            for shard in list(self._active.values()):
                await self._flush(shard)
            # Threads may be claiming or renewing yet.
            await asyncio.to_thread(self._pool.shutdown)
            await asyncio.to_thread(self._job.release_all)
        except Exception as error:
            self._fail(error)
        self._files.close()

    # Rows.

    async def _feed(self) -> None:
        """Take shards and hand their rows to the slots, until all of the scope are done."""
        while True:
            self._has_published.clear()
            claim = await self._in_thread(partial(self._job.claim, self._scope))
            if claim is not None:
                await self._feed_shard(claim)
            elif self._active:
                await self._has_published.wait()
            elif self._job.is_done(self._scope):
                self._wake_all()
                return
            else:
                await asyncio.sleep(min(_LONGEST_WAIT_FOR_OTHERS_S, self._job.lease_s / 4))

    async def _feed_shard(self, claim: Claim) -> None:
        shard = self._job.manifest.shards[claim.shard]
        records = await self._in_thread(partial(self._job.recover, claim))
        run = self._active[claim.shard] = ShardRun(claim, shard.num_rows, records)
        self.num_recovered += len(records)
        path = await self._in_thread(partial(self._files.path, shard.input))
        rows = self._source.rows(path, shard.piece)
        while part := await self._in_thread(lambda: list(itertools.islice(rows, _SLICE_ROWS))):
            for unit in self._units_of(run, [row for row in part if row.index not in run.records]):
                while len(self._units) >= self._concurrency.limit + _UNITS_AHEAD:
                    self._has_room.clear()
                    await self._has_room.wait()
                self._units.append(unit)
                self._wake_one()
        self._end_if_whole(run)

    def _units_of(self, run: ShardRun, rows: list[Row]) -> list[Unit]:
        """Group rows that go in one request. Those that cannot be sent get their records."""
        most = self._options.rows_per_request or min(_MAX_ROWS, self._kind.max_rows)
        most_bytes = _MAX_BYTES if not self._options.rows_per_request else 0
        units: list[Unit] = []
        num_bytes = 0  # of the last one
        for row in rows:
            try:
                if row.problem:
                    raise InvalidArgumentError(row.problem)
                prepared = self._kind.prepare(row.columns)
            except InvalidArgumentError as error:
                self._add(run, Record(row.index, error.message, INVALID_ROW, 0))
                continue
            last = units[-1] if units and most > 1 else None
            size = self._kind.num_bytes(prepared) if most_bytes and most > 1 else 0
            if (
                last is not None
                and len(last.indexes) < most
                and num_bytes + size <= most_bytes
                and self._kind.may_join(last.prepared[0], prepared)
            ):
                last.indexes.append(row.index)
                last.prepared.append(prepared)
                num_bytes += size
            else:
                units.append(Unit(run, [row.index], [prepared]))
                num_bytes = size
        return units

    def _wake_one(self) -> None:
        """A unit has come: let a slot that waits take it, or begin another slot."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        if self._num_slots < self._concurrency.limit and not self._stopping.is_set():
            self._num_slots += 1
            task = asyncio.create_task(self._slot())
            self._slots.add(task)
            task.add_done_callback(self._end_slot)

    def _wake_all(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def _slot(self) -> None:
        """Send units one by one, as the number of requests in flight allows."""
        session = self._target.session()
        try:
            while not self._stopping.is_set() and self._num_slots <= self._concurrency.limit:
                if not self._units:
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    await waiter
                    continue
                unit = self._units.popleft()
                self._has_room.set()
                if not unit.shard.is_lost:
                    await self._send(session, unit)
                if self._units and self._num_slots < self._concurrency.limit:
                    self._wake_one()
        finally:
            self._num_slots -= 1
            session.close()

    def _end_slot(self, task: asyncio.Task[None]) -> None:
        self._slots.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _send(self, session: Session, unit: Unit, num_attempts: int = 0, *, is_alone: bool = False) -> None:
        """Send rows until they are answered, and add their records. With `is_alone` the gate is held."""
        pause_s, num_passing = _FIRST_PAUSE_S, 0
        while True:
            num_attempts += 1
            try:
                if is_alone:
                    values = await self._kind.ask(session, unit.prepared)
                else:
                    async with self._gate.many():
                        values = await self._kind.ask(session, unit.prepared)
                break
            except RefusedError as error:
                is_passing = num_passing + 1 < self._most_attempts(error)
                if not is_passing and error.status not in (UNREACHABLE, _OVERLOADED):
                    await self._refuse(session, unit, error, num_attempts, is_alone=is_alone)
                    return
                num_passing += is_passing
                self._note(error)
            if self._stopping.is_set():
                return  # the next run sends them
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - not for secrets
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._answered_s = asyncio.get_running_loop().time()
        self._concurrency.answered(self._answered_s)
        for index, value in zip(unit.indexes, values, strict=True):
            self._add(unit.shard, Record(index, value, "", num_attempts))
        self._end_if_whole(unit.shard)

    def _most_attempts(self, error: RefusedError) -> int:
        if error.status in _PASSING:
            return _MAX_PASSING
        return _MAX_FAILED if error.status >= 500 and not self._kind.shares_batches else 0

    def _note(self, error: RefusedError) -> None:
        """A refusal after which the request is sent again."""
        now_s = asyncio.get_running_loop().time()
        if error.status == _OVERLOADED:
            self._concurrency.refused(now_s)
        if error.status != UNREACHABLE:
            self._answered_s = now_s
        elif now_s - self._answered_s > self._options.patience_s and not self._stopping.is_set():
            logger.error("the server has not answered for %g s: %s", self._options.patience_s, error)
            self.stop(Ending.UNREACHABLE)

    async def _refuse(
        self, session: Session, unit: Unit, error: RefusedError, num_attempts: int, *, is_alone: bool
    ) -> None:
        """A refusal for good. If another row may be at fault, of the request or of the server's batch, try alone."""
        is_shared = self._kind.shares_batches and (error.status == _INVALID or error.status >= 500)
        if not is_alone and (len(unit.indexes) > 1 or is_shared):
            async with self._gate.alone():
                for index, prepared in zip(unit.indexes, unit.prepared, strict=True):
                    if not self._stopping.is_set():
                        await self._send(session, Unit(unit.shard, [index], [prepared]), num_attempts, is_alone=True)
            return
        self._answered_s = asyncio.get_running_loop().time()
        self._add(unit.shard, self._kind.refused(unit.indexes[0], error, num_attempts))
        self._end_if_whole(unit.shard)

    def _add(self, shard: ShardRun, record: Record) -> None:
        shard.records[record.index] = record
        shard.pending.append(record)
        self.num_answered += not record.code
        self.num_failed += bool(record.code)
        if self._options.max_failed and self.num_failed > self._options.max_failed and not self._stopping.is_set():
            self.stop(Ending.TOO_MANY_FAILED)

    # Files.

    async def _keep(self) -> None:
        """Keep records and claims, until cancelled."""
        while True:
            await asyncio.sleep(min(self._options.flush_s, self._job.lease_s / 3))
            try:
                for shard in list(self._active.values()):
                    if shard.is_ending:
                        continue
                    if await self._in_thread(partial(self._job.renew, shard.claim)):
                        await self._flush(shard)
                    elif not shard.is_ending:
                        logger.warning("another worker has taken shard %d", shard.claim.shard)
                        shard.is_lost = True
                        self._active.pop(shard.claim.shard, None)
                        self._job.forget(shard.claim)
                        self._has_published.set()
            except Exception as error:
                self._fail(error)

    async def _flush(self, shard: ShardRun) -> None:
        async with shard.lock:
            pending, shard.pending = shard.pending, []
            if pending and not shard.is_ending:
                await self._in_thread(partial(self._job.keep, shard.claim, pending))

    def _end_if_whole(self, shard: ShardRun) -> None:
        if len(shard.records) == shard.num_rows and not shard.is_lost and not shard.is_ending:
            shard.is_ending = True
            task = asyncio.create_task(self._publish(shard))
            self._publishing.add(task)
            task.add_done_callback(self._publishing.discard)

    async def _publish(self, shard: ShardRun) -> None:
        try:
            async with shard.lock:
                await self._in_thread(partial(self._write, shard))
        except Exception as error:
            self._fail(error)
        else:
            self._active.pop(shard.claim.shard, None)
        self._has_published.set()

    def _write(self, run: ShardRun) -> None:
        """Join the records with the rows of the input, and publish the files. Called in a thread."""
        manifest, number = self._job.manifest, run.claim.shard
        shard = manifest.shards[number]
        name = manifest.inputs[shard.input].name
        # The file's rows before this shard.
        first = sum(other.num_rows for other in manifest.shards[:number] if other.input == shard.input)
        outputs: list[Columns] = []
        errors: list[Columns] = []
        for row in self._source.rows(self._files.path(shard.input), shard.piece):
            record = run.records[row.index]
            make = self._kind.error_row if record.code else self._kind.output_row
            (errors if record.code else outputs).append(make(name, first + row.index, row, record))
        part = self._kind.encode(outputs)
        counts = Counts(len(outputs), len(errors))
        self._job.publish(run.claim, part, b"".join(map(json_line, errors)), counts)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class _Gate:
    """Lets many requests be in flight, or one that is alone."""

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def many(self) -> AsyncIterator[None]:
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._turn:
            self._is_open.clear()
            try:
                while self._num_inside:
                    self._is_empty.clear()
                    await self._is_empty.wait()
                yield
            finally:
                self._is_open.set()


class _LocalFiles:
    """The input files on this machine, each fetched once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stack = ExitStack()
        self._lock = threading.Lock()  # guards _paths
        self._paths: dict[int, Path] = {}

    def path(self, number: int) -> Path:
        """Blocks while the file is fetched."""
        with self._lock:
            if number not in self._paths:
                file = self._job.manifest.inputs[number]
                local = InputFile(file.name, file.size_bytes, file.tag).local()
                self._paths[number] = self._stack.enter_context(local)
            return self._paths[number]

    def close(self) -> None:
        """Remove the copies."""
        self._stack.close()
