"""The load processes as one: started together, sent the same commands, with merged records."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType

import numpy as np
import numpy.typing as npt

from modelserver.bench.recorder import NUM_TIMES
from modelserver.bench.work import (
    BeginClosed,
    BeginOpen,
    BeginPeriodic,
    ClosedLoad,
    Collect,
    Collected,
    Command,
    End,
    Ended,
    Failed,
    LlmWork,
    OpenLoad,
    PeriodicLoad,
    Reply,
    Setup,
    SetupLlm,
    Share,
    Work,
    read_reply,
    write_message,
)
from modelserver.errors import ErrorCode, InternalError, ServerError

Times = npt.NDArray[np.int64]

DRAIN_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 5.0


def _no_times() -> Times:
    return np.empty((0, NUM_TIMES), dtype=np.int64)


def _no_numbers() -> Times:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Harvest:
    """Records of all processes. `times` has a row of five per answered request (see `records`)."""

    times: Times = field(default_factory=_no_times)
    num_responses: Times = field(default_factory=_no_numbers)
    response_times: Times = field(default_factory=_no_numbers)
    failure_times: Times = field(default_factory=_no_numbers)
    failures: Counter[str] = field(default_factory=Counter)
    # The largest share of a CPU that one of the processes used since the last harvest.
    busiest: float = 0.0
    cpu_s: float = 0.0
    is_over: bool = False
    calls: list[bytes] = field(default_factory=list)

    def add(self, other: Harvest) -> None:
        self.times = np.concatenate((self.times, other.times))
        self.num_responses = np.concatenate((self.num_responses, other.num_responses))
        self.response_times = np.concatenate((self.response_times, other.response_times))
        self.failure_times = np.concatenate((self.failure_times, other.failure_times))
        self.failures += other.failures
        self.busiest = max(self.busiest, other.busiest)
        self.cpu_s += other.cpu_s
        self.is_over = other.is_over
        self.calls += other.calls


class _Process:
    """One load process and its control socket."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.process = process
        self._control = control
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.cpu_s = 0.0
        self.collected_s = monotonic()

    async def ask(self, command: Command) -> Reply:
        """Raises the process's error, and InternalError when it has died."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._control, limit=2**20)
        try:
            await write_message(self._writer, command)
            reply = await read_reply(self._reader)
        except ConnectionError:
            reply = None
        if reply is None:
            status = await asyncio.to_thread(self.process.wait, EXIT_TIMEOUT_S)
            raise InternalError(f"a load process ended with status {status}; what it printed is above")
        if isinstance(reply, Failed):
            raise ServerError(reply.message, code=ErrorCode(reply.code))
        return reply

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._control.close()


class Fleet:
    """Use as an async context manager; at its end all processes have ended."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._processes: list[_Process] = []

    @property
    def num_workers(self) -> int:
        return self._num_workers

    async def __aenter__(self) -> Fleet:
        for _ in range(self._num_workers):
            self._processes.append(_start())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.close()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        """Processes end when their socket is closed; those that do not are killed."""
        for process in self._processes:
            try:
                process.process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.process.send_signal(signal.SIGKILL)
                process.process.wait()

    async def set_up(self, work: Work | LlmWork) -> None:
        """Send the work to all processes."""
        await asyncio.gather(
            *(
                process.ask(
                    Setup(work, Share(index, self._num_workers))
                    if isinstance(work, Work)
                    else SetupLlm(work, Share(index, self._num_workers))
                )
                for index, process in enumerate(self._processes)
            )
        )

    async def begin(self, load: ClosedLoad | OpenLoad | PeriodicLoad) -> None:
        """Start a load; it continues until `end`."""
        if isinstance(load, ClosedLoad):
            command: Command = BeginClosed(load)
        elif isinstance(load, OpenLoad):
            command = BeginOpen(load)
        else:
            command = BeginPeriodic(load)
        await asyncio.gather(*(process.ask(command) for process in self._processes))

    async def collect(self) -> Harvest:
        """The records since the last call."""
        harvest = Harvest(is_over=True)
        replies = await asyncio.gather(*(process.ask(Collect()) for process in self._processes))
        for process, reply in zip(self._processes, replies, strict=True):
            assert isinstance(reply, Collected), "Collect is answered by Collected"
            now_s = monotonic()
            used_s, passed_s = reply.cpu_s - process.cpu_s, now_s - process.collected_s
            process.cpu_s, process.collected_s = reply.cpu_s, now_s
            is_over = harvest.is_over and reply.is_over
            harvest.add(
                Harvest(
                    times=np.frombuffer(reply.times, np.int64).reshape(-1, NUM_TIMES),
                    num_responses=np.frombuffer(reply.num_responses, np.int64),
                    response_times=np.frombuffer(reply.response_times, np.int64),
                    failure_times=np.frombuffer(reply.failure_times, np.int64),
                    failures=Counter(reply.failures),
                    busiest=min(1.0, used_s / passed_s) if passed_s > 0 else 0.0,
                    cpu_s=used_s,
                    calls=[reply.calls] if reply.calls else [],
                )
            )
            harvest.is_over = is_over
        return harvest

    async def end(self, timeout_s: float = DRAIN_TIMEOUT_S) -> int:
        """Stop the load; returns how many of its requests were never answered."""
        replies = await asyncio.gather(*(process.ask(End(timeout_s)) for process in self._processes))
        return sum(reply.num_unanswered for reply in replies if isinstance(reply, Ended))


def _start() -> _Process:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            [sys.executable, "-m", "modelserver.bench.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            # A Ctrl+C is for the bench, which ends its processes in order.
            process_group=0,
        )
    ours.setblocking(False)
    return _Process(process, ours)
