"""One network over several processes: each rank has a share of heads and neurons, and sums are taken over all.

Rank 0 is the engine's own process. The others follow: they get each step as it is planned, compute their share of it,
and sample nothing. They end with the engine, also when it dies: then their pipe ends.

The arrays of a step lie in memory that all ranks of this machine share, and a message of some numbers says how long
they are: rank 0 writes the next ones when it has taken the last sum of a step, for which every rank has read its
arrays. Ranks of other machines (`nodes`) get the arrays behind the numbers. `rank_messages` has all other messages.

On GPUs steps are graphs on every rank, decodes whole and others in pieces, with the sums in them. Rank 0 says which
ones to capture or to run next, so all ranks take the same sums in the same order. A rank that cannot capture computes
the same padded step without. Block tables stay on the devices, and a step brings what is new.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from modelserver.backend import InternalError, InvalidArgumentError

from .block_tables import TableChange
from .captured_decode import Leading
from .lora.adapter import Adapter
from .models.linear_tensors import Rank
from .nodes import MOST_BYTES, RANK_MODULE, Meeting, ended, shut, watch
from .options import EngineOptions
from .rank_messages import (
    CAPTURE,
    CAPTURE_PIECES,
    Beat,
    Embedding,
    Measure,
    Membership,
    Message,
    Placing,
    Pool,
    packed,
)
from .step_board import StepBoard
from .step_inputs import StepInputs

logger = logging.getLogger(__name__)

# Ranks load weights at their own pace before the first sum is taken. Steps have a limit of their own (`limit_steps`).
_SUM_TIMEOUT = timedelta(minutes=30)
# All ranks are there when they begin to connect.
_CONNECT_TIMEOUT = timedelta(minutes=1)
_CLOSE_S = 10.0
_FOLLOW = "import importlib, sys; importlib.import_module(sys.argv[1]).follow(*map(int, sys.argv[2:]))"
# How much of the end of a rank's output the error of its death quotes.
_LAST_LINES = 20
# How often a rank says how far it is within the limit of a step, and the longest time between two reports.
_BEATS_IN_LIMIT, _MOST_BEAT_S = 8, 5.0


class RemoteFollower:
    """A rank of another machine, and the connection to it."""

    is_local = False

    def __init__(self, index: int, pipe: Connection) -> None:
        self.index = index
        self.pipe = pipe
        # When the rank last said how far it is, and what it said, see `rank_process._Pulse`.
        self.heard_s = 0.0
        self.progress = 0

    @property
    def name(self) -> str:
        return f"rank {self.index}" if self.is_local else f"rank {self.index}, on another node,"

    def await_sign(self) -> None:
        """Wait until the rank is about to join the others; again: until it has loaded its share.

        Raises InternalError when it ends before, or cannot.
        """
        try:
            problem = self.pipe.recv_bytes(MOST_BYTES)
        except (EOFError, OSError):
            raise self.death() from None
        if problem:
            raise InternalError(f"rank {self.index} of this LLM failed on its node: {problem.decode(errors='replace')}")

    def answer(self) -> int:
        """A number. Raises InternalError when the rank has ended."""
        try:
            return int(self.pipe.recv_bytes(MOST_BYTES))
        except (EOFError, OSError):
            raise self.death() from None

    def death(self) -> InternalError:
        """The error that says how the rank, whose pipe has ended, has ended itself."""
        return InternalError(f"rank {self.index} of this LLM, on another node, has ended; see the output of that node")

    def close(self) -> None:
        shut(self.pipe)
        self.pipe.close()


class Follower(RemoteFollower):
    """Another rank's process on this machine, its pipe, and the last lines that it has written."""

    is_local = True

    def __init__(self, membership: Membership, board: int) -> None:
        """`board`: the descriptor of the `StepBoard`'s file."""
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _FOLLOW, RANK_MODULE, str(theirs.fileno()), str(board)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command,
                env=environment,
                pass_fds=[theirs.fileno(), board],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        super().__init__(membership.index, Connection(ours.detach()))
        self._reader = threading.Thread(target=self._pass_output_on, name=f"rank-{self.index}-output", daemon=True)
        self._reader.start()

    def death(self) -> InternalError:
        try:
            how = f"ended with code {self.process.wait(_CLOSE_S)}"
        except subprocess.TimeoutExpired:
            how = "has closed its pipe"
        self._reader.join(_CLOSE_S)
        said = "\n".join(self._lines) or "nothing"
        return InternalError(f"rank {self.index} of this LLM {how}; the last that it wrote: {said}")

    def close(self) -> None:
        super().close()
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(_CLOSE_S)

    def _pass_output_on(self) -> None:
        """To our own stderr; in a thread."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._lines.append(line.rstrip("\n"))
                sys.stderr.write(line)


class Followers:
    """The other ranks, as rank 0 has them. `close` ends them."""

    def __init__(self, place: Path, options: EngineOptions) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="modelserver-ranks-")
        membership = Membership(place.absolute(), options, Path(self._directory.name) / "store", 0)
        self._ranks: list[RemoteFollower] = []
        self._is_closed = False
        self.lost: InternalError | None = None
        self._limit_s = options.distributed_timeout_seconds
        self._watcher: threading.Thread | None = None
        # When the step under way began; None: there is none. How far this rank is, see `rank_process._Pulse`.
        self._began_s: float | None = None
        self._progress = 0
        self._board_file = os.memfd_create("modelserver-steps", os.MFD_CLOEXEC)
        self._board = StepBoard(self._board_file)
        try:
            shared: dist.Store | None = None
            if options.nodes is not None:
                meeting = Meeting(options.nodes, membership.size)
                self._ranks += [RemoteFollower(index, pipe) for index, pipe in meeting.gather().items()]
                shared, port = _open_store(meeting.address, membership.size)
                membership = replace(membership, store=port, host=meeting.address)
            for index in range(1, _num_local(options)):
                self._ranks.append(Follower(replace(membership, index=index), self._board_file))
            for rank in self._ranks:
                self._send_to(rank, packed(replace(membership, index=rank.index)))
            for rank in self._ranks:
                rank.await_sign()
            rank_0 = join(membership, rank_options(options, 0).device, shared)
            self.rank = replace(rank_0, sum=partial(self._add_up, rank_0.sum))
        except BaseException:
            self.close()
            raise

    def await_loaded(self) -> None:
        """Wait until all ranks have loaded. Raises InternalError when one has ended."""
        for rank in self._ranks:
            rank.await_sign()
        pipes = [rank.pipe for rank in self._ranks]
        if not all(rank.is_local for rank in self._ranks):
            watch(pipes, self._end_without)
        elif self.rank.abort is not None:
            watch(pipes, self._end_sums)

    def check(self) -> None:
        """Raises InternalError if a rank has ended or hangs: what a step has computed means nothing then."""
        if self.lost is not None:
            raise self.lost

    def limit_steps(self) -> None:
        """From now on the engine ends when a step takes longer than `distributed_timeout_seconds`."""
        if self._limit_s:
            interval_s = min(self._limit_s / _BEATS_IN_LIMIT, _MOST_BEAT_S)
            self._tell(Beat(interval_s))
            self._watcher = threading.Thread(
                target=self._watch_steps, args=(interval_s,), name="step-watch", daemon=True
            )
            self._watcher.start()

    def begin_step(self) -> None:
        """A step, or texts that are embedded; until `end_step`."""
        self._began_s = time.monotonic()

    def end_step(self) -> None:
        """It has ended, or failed."""
        self._began_s = None

    def open_pool(self, pool: Pool) -> None:
        """Let the ranks compute on blocks of their own; those that they had are given back."""
        self._tell(pool)

    def step(self, step: StepInputs, size: int, change: TableChange | None) -> None:
        """The same step, which rank 0 computes next, see `StepBoard.write`."""
        self._show(self._board.write(step, size, change))

    def capture_pieces(self, size: int, has_adapters: bool) -> None:
        """The graphs that rank 0 captures next, see `CapturedPieces`."""
        self._send(CAPTURE_PIECES + np.array([size, has_adapters], dtype=np.int64).tobytes())

    @property
    def leading(self) -> Leading:
        """Of decode steps in graphs."""
        return Leading(
            capture=lambda size, has_adapters: self._send(
                CAPTURE + np.array([size, has_adapters], dtype=np.int64).tobytes()
            ),
            step=lambda size, has_adapters, words: self._show(self._board.write_words(size, has_adapters, words)),
        )

    def measure(self, phase: str) -> None:
        """Let the ranks measure, too, see `Measure`."""
        self._tell(Measure(phase))

    def least_left(self) -> int:
        """End measuring: the bytes that the rank with the least memory leaves for its KV cache."""
        self.measure("end")
        return min(rank.answer() for rank in self._ranks)

    def embed(self, token_id_lists: Sequence[Sequence[int]], *, has_adapter: bool = False) -> None:
        self._tell(Embedding(tuple(map(tuple, token_id_lists)), has_adapter))

    def place(self, slot: int, adapter: Adapter) -> None:
        self._tell(Placing(slot, adapter))

    def close(self) -> None:
        self._is_closed = True
        if self._watcher is not None:
            for rank in self._ranks:
                shut(rank.pipe)
            self._watcher.join()
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        if self._board_file >= 0:
            os.close(self._board_file)
            self._board_file = -1
        self._directory.cleanup()

    def _end_without(self, index: int) -> None:
        """End the engine's process, as a rank has left: a sum that waits for it would wait for half an hour.

        The server starts another process, which meets all ranks anew.
        """
        if not self._is_closed:
            logger.error("%s; the engine ends with it", self._ranks[index].death().message)
            os._exit(1)

    def _end_sums(self, index: int) -> None:
        """A rank has left. On a GPU sums would wait for it, and the host for the GPU, for half an hour."""
        if not self._is_closed and self.rank.abort is not None and self.lost is None:
            self.lost = self._ranks[index].death()
            logger.error("%s", self.lost.message)
            self.rank.abort()

    def _add_up(self, add_up: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor) -> torch.Tensor:
        self._progress += self.rank.abort is None
        try:
            return add_up(part)
        except RuntimeError:  # most likely since a rank's connections have ended
            self.check()
            for index in ended([rank.pipe for rank in self._ranks])(_CLOSE_S):
                self.lost = self._ranks[index].death()
                raise self.lost from None
            raise

    def _watch_steps(self, interval_s: float) -> None:
        """Hear the ranks, and end what takes too long; in a thread."""
        now_s = awake_s = time.monotonic()
        for rank in self._ranks:
            rank.heard_s = now_s
        heard = {rank.pipe: rank for rank in self._ranks}
        while not self._is_closed:
            for pipe in wait(list(heard), timeout=interval_s):
                assert isinstance(pipe, Connection), "no others were given"
                try:
                    heard[pipe].progress = int(pipe.recv_bytes(MOST_BYTES))
                except (EOFError, OSError, ValueError):  # it has ended, or says that it will
                    del heard[pipe]
                else:
                    heard[pipe].heard_s = time.monotonic()
            if not heard:
                return
            before_s, now_s = now_s, time.monotonic()
            if now_s - before_s > self._limit_s / 2:  # this process itself was stopped
                awake_s = now_s
            began_s = self._began_s
            if began_s is not None and now_s - max(began_s, awake_s) > self._limit_s:
                self._end_hung(now_s)
                return

    def _end_hung(self, now_s: float) -> None:
        """The step has taken too long. Let it fail, and so the engine; or end the engine's process with it."""
        self.lost = InternalError(
            f"a step of this LLM has not ended within {self._limit_s:g} s (distributed_timeout_seconds): "
            f"{self._who_hangs(now_s)}"
        )
        logger.error("%s; the engine ends", self.lost.message)
        for rank in self._ranks:
            if isinstance(rank, Follower):  # one that is stopped would outlive the engine
                rank.process.kill()
        if all(rank.is_local for rank in self._ranks):
            if self.rank.abort is not None:
                self.rank.abort()
            deadline_s = time.monotonic() + _CLOSE_S
            while self._began_s is not None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            if self._began_s is None:
                return
        os._exit(1)

    def _who_hangs(self, now_s: float) -> str:
        silent = [rank for rank in self._ranks if now_s - rank.heard_s > self._limit_s / 2]
        if silent:
            return "; ".join(f"{rank.name} has not answered for {now_s - rank.heard_s:.1f} s" for rank in silent)
        least = min(self._progress, *(rank.progress for rank in self._ranks))
        behind = [rank.name for rank in self._ranks if rank.progress == least]
        if self._progress == least:
            behind.insert(0, "rank 0")
        if len(behind) <= len(self._ranks):
            return f"all ranks answer, and the others wait for {' and '.join(behind)}"
        return "all ranks answer, and wait for each other or compute"

    def _show(self, written: bytes) -> None:
        """What the board has, to ranks that see it, and to those that do not."""
        self._progress += 1
        carried = None
        for rank in self._ranks:
            if not rank.is_local and carried is None:
                carried = self._board.carried(written)
            self._send_to(rank, written if rank.is_local or carried is None else carried)

    def _tell(self, message: Message) -> None:
        self._send(packed(message))

    def _send(self, data: bytes) -> None:
        self._progress += 1
        for rank in self._ranks:
            self._send_to(rank, data)

    def _send_to(self, rank: RemoteFollower, data: bytes) -> None:
        try:
            rank.pipe.send_bytes(data)
        except OSError:
            self.lost = self.lost or rank.death()
            raise self.lost from None


def rank_options(options: EngineOptions, index: int) -> EngineOptions:
    """Each rank has a GPU of its own on its machine."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        size = _num_local(options)
        if torch.cuda.device_count() < size:
            raise InvalidArgumentError(
                f"tensor_parallel_size {options.tensor_parallel_size} needs {size} GPUs on each machine; "
                f"{torch.cuda.device_count()} are here"
            )
        device = f"cuda:{index % size}"
    return replace(options, device=device)


def _num_local(options: EngineOptions) -> int:
    """How many ranks each machine has."""
    size = options.tensor_parallel_size
    return size if options.nodes is None else options.nodes.num_local(size)


def _open_store(host: str, size: int) -> tuple[dist.Store, int]:
    """Where the ranks of several machines find each other, and its port at this address of the leader."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(host, port, size, True, master_listen_fd=listener.detach(), wait_for_workers=False)
    return store, port


def join(membership: Membership, device: str, shared: dist.Store | None = None, address: str = "") -> Rank:
    """This process's place among the ranks; waits until all are there. `shared` is the leader's own store, `address`
    that of this machine for the others, if there are others."""
    index, size = membership.index, membership.size
    if shared is None:
        if isinstance(membership.store, int):
            shared = dist.TCPStore(membership.host, membership.store, size, False, wait_for_workers=False)
        else:
            shared = dist.FileStore(str(membership.store), size)
    group: Any
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        group = dist.ProcessGroupNCCL(shared, index, size)
    else:
        settings = dist.ProcessGroupGloo._Options()
        settings._timeout = _CONNECT_TIMEOUT
        if address := address or membership.host:
            settings._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        else:
            settings._devices = [dist.ProcessGroupGloo.create_default_device()]
        group = dist.ProcessGroupGloo(shared, index, size, settings)
    options = dist.AllreduceOptions()
    options.timeout = _SUM_TIMEOUT

    def add_up(part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        group.allreduce([part], options).wait()
        return part

    return Rank(index, size, add_up, group.abort if device.startswith("cuda") else None)
