"""One network over several processes: each rank has a share of heads and neurons, and sums are taken over all.

Rank 0 is the engine's own process. The others follow: they get each step as it is planned, compute their share of it,
and sample nothing. They end with the engine, also when it dies: then their pipe ends.

The arrays of a step lie in memory that all ranks of this machine share, and a message of some numbers says how long
they are: rank 0 writes the next ones when it has taken the last sum of a step, for which every rank has read its
arrays. Ranks of other machines (`nodes`) get the arrays behind the numbers.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from modelserver.backend import InternalError, InvalidArgumentError

from .attention.choose import make_attention
from .attention.chunked import make_sdpa
from .attention.kv_blocks import KvBlocks
from .attention.paged import AttentionBatch, IntArray
from .checkpoint import open_checkpoint
from .compute_thread import share_of_threads
from .lora.adapter import Adapter
from .lora.step import EMBEDDING_SLOT
from .models.linear_tensors import Rank
from .models.load import LoadedNetwork, load_network
from .nodes import Meeting, connect_rank, die_with_parent, hang_up, local_address, watch
from .options import EngineOptions
from .step_context import StepContext, compute_fresh
from .step_inputs import StepInputs

logger = logging.getLogger(__name__)

# Ranks load weights at their own pace before the first sum is taken.
_SUM_TIMEOUT = timedelta(minutes=30)
# All ranks are there when they begin to connect.
_CONNECT_TIMEOUT = timedelta(minutes=1)
_CLOSE_S = 10.0
# How much of the end of a rank's output the error of its death quotes.
_LAST_LINES = 20
# Of a step; at least one of them is not empty.
_NUM_ARRAYS = 8


@dataclass(frozen=True, slots=True)
class Membership:
    """The settings of a follower. `place` is the checkpoint's; ranks find each other by the file `store`, or at that
    port of the leader. `host` is the leader's address for the ranks of its own machine."""

    place: Path
    options: EngineOptions
    store: Path | int
    index: int
    host: str = ""

    @property
    def size(self) -> int:
        return self.options.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class Pool:
    """How many KV blocks every rank has."""

    num_blocks: int
    block_size: int


class StepBoard:
    """Memory for the arrays of one step, of a file without a name that all ranks have open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: IntArray = np.empty(0, dtype=np.int64)

    def write(self, step: StepInputs) -> bytes:
        """Put the step there; what the other ranks need to read it."""
        batch = step.batch
        arrays = [
            step.input_ids,
            step.positions,
            batch.num_queries,
            batch.lens,
            batch.slots,
            batch.block_tables.reshape(-1),
            np.array(step.adapter_slots, dtype=np.int64),
            np.array(step.adapter_bounds, dtype=np.int64),
        ]
        sizes = [array.size for array in arrays]
        if sum(sizes) > len(self._memory):
            os.ftruncate(self._descriptor, 2 * 8 * sum(sizes))
            self._map()
        np.concatenate(arrays, out=self._memory[: sum(sizes)])
        return np.array([batch.num_decodes, *sizes], dtype=np.int64).tobytes()

    def carried(self, written: bytes) -> bytes:
        """What `write` returned, with the arrays behind it."""
        _, *sizes = np.frombuffer(written, dtype=np.int64).tolist()
        return written + self._memory[: sum(sizes)].tobytes()

    def read(self, written: bytearray) -> tuple[IntArray, IntArray, AttentionBatch, list[int], list[int]]:
        """Token ids, positions, batch, and adapters' slots and bounds; views of the memory, or of what was carried."""
        numbers = np.frombuffer(written, dtype=np.int64)
        num_decodes, *sizes = numbers[: 1 + _NUM_ARRAYS].tolist()
        arrays = numbers[1 + _NUM_ARRAYS :]
        if not len(arrays):
            if sum(sizes) > len(self._memory):
                self._map()
            arrays = self._memory[: sum(sizes)]
        input_ids, positions, num_queries, lens, slots, tables, adapter_slots, bounds = np.split(
            arrays, np.cumsum(sizes[:-1])
        )
        batch = AttentionBatch(num_decodes, num_queries, lens, tables.reshape(len(lens), -1), slots)
        return input_ids, positions, batch, adapter_slots.tolist(), bounds.tolist()

    def _map(self) -> None:
        """All of the file. Arrays that view what was mapped before keep it."""
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Embedding:
    token_id_lists: tuple[tuple[int, ...], ...]
    has_adapter: bool = False


@dataclass(frozen=True, slots=True)
class Placing:
    """An adapter, whole, of which each rank keeps its share."""

    slot: int
    adapter: Adapter


class RemoteFollower:
    """A rank of another machine, and the connection to it."""

    is_local = False

    def __init__(self, index: int, pipe: Connection) -> None:
        self.index = index
        self.pipe = pipe

    def await_sign(self) -> None:
        """Wait until the rank is about to join the others; again: until it has loaded its share.

        Raises InternalError when it ends before, or cannot.
        """
        try:
            problem = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self.death() from None
        if problem:
            raise InternalError(f"rank {self.index} of this LLM failed on its node: {problem.decode(errors='replace')}")

    def death(self) -> InternalError:
        """The error that says how the rank, whose pipe has ended, has ended itself."""
        return InternalError(f"rank {self.index} of this LLM, on another node, has ended; see the output of that node")

    def close(self) -> None:
        hang_up(self.pipe)


class Follower(RemoteFollower):
    """Another rank's process on this machine, its pipe, and the last lines that it has written."""

    is_local = True

    def __init__(self, membership: Membership, board: int) -> None:
        """`board`: the descriptor of the `StepBoard`'s file."""
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _FOLLOW, __name__, str(theirs.fileno()), str(board)]
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
                _send(rank, pickle.dumps(replace(membership, index=rank.index)))
            for rank in self._ranks:
                rank.await_sign()
            rank_0 = join(membership, rank_options(options, 0).device, shared)
            self.rank = replace(rank_0, sum=partial(self._add_up, rank_0.sum))
        except BaseException:
            self.close()
            raise

    def open_pool(self, pool: Pool) -> None:
        """Wait until all ranks have loaded, and let them compute. Raises InternalError when one has ended."""
        for rank in self._ranks:
            rank.await_sign()
        if not all(rank.is_local for rank in self._ranks):
            watch([rank.pipe for rank in self._ranks], self._end_without)
        self._tell(pool)

    def step(self, step: StepInputs) -> None:
        """The same step, which rank 0 computes next."""
        written = _STEP + self._board.write(step)
        carried = None
        for rank in self._ranks:
            if not rank.is_local and carried is None:
                carried = _STEP + self._board.carried(written[1:])
            _send(rank, written if rank.is_local or carried is None else carried)

    def embed(self, token_id_lists: Sequence[Sequence[int]], *, has_adapter: bool = False) -> None:
        self._tell(Embedding(tuple(map(tuple, token_id_lists)), has_adapter))

    def place(self, slot: int, adapter: Adapter) -> None:
        self._tell(Placing(slot, adapter))

    def close(self) -> None:
        self._is_closed = True
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

    def _add_up(self, add_up: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor) -> torch.Tensor:
        try:
            return add_up(part)
        except RuntimeError:  # most likely since a rank's connections have ended
            ended = wait([rank.pipe for rank in self._ranks], timeout=_CLOSE_S)
            for rank in self._ranks:
                if rank.pipe in ended:
                    raise rank.death() from None
            raise

    def _tell(self, message: Pool | Embedding | Placing) -> None:
        self._send(_OTHER + pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _send(self, packed: bytes) -> None:
        for rank in self._ranks:
            _send(rank, packed)


def _send(rank: RemoteFollower, packed: bytes) -> None:
    try:
        rank.pipe.send_bytes(packed)
    except OSError:
        raise rank.death() from None


_FOLLOW = "import importlib, sys; importlib.import_module(sys.argv[1]).follow(*map(int, sys.argv[2:]))"
# What a message begins with: one of a step, and one of what comes seldom.
_STEP, _OTHER = b"S", b"O"
# From a rank: all is well.
_SIGN = b""


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

    return Rank(index, size, add_up)


def follow(descriptor: int, board: int) -> None:
    """The main function of the other ranks' processes."""
    with Connection(descriptor) as pipe:
        _follow(pipe, pipe.recv(), StepBoard(board))


def join_from_afar(host: str, port: str, rank: str, token: str, parent: str) -> None:
    """The main function of ranks on other machines than the leader's; the process `parent` started this one."""
    die_with_parent(int(parent))
    with connect_rank(host, int(port), int(rank), token) as pipe:
        watch([pipe], lambda _: os._exit(0))  # the engine has ended, even while a sum waits for it
        try:
            membership = replace(pipe.recv(), host=host)
            _follow(pipe, membership, StepBoard(-1), local_address(pipe))
        except Exception as error:
            pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
            raise


def _follow(pipe: Connection, membership: Membership, board: StepBoard, address: str = "") -> None:
    options = rank_options(membership.options, membership.index)
    torch.set_num_threads(options.num_threads or share_of_threads(options))
    pipe.send_bytes(_SIGN)  # about to join
    rank = join(membership, options.device, address=address)
    with open_checkpoint(membership.place) as checkpoint:
        loaded = load_network(checkpoint, options, rank)
    pipe.send_bytes(_SIGN)  # ready to compute
    try:
        pool: Pool = pickle.loads(pipe.recv_bytes()[1:])  # noqa: S301 - of the engine's own process
        _compute(pipe, board, loaded, options, pool)
    except EOFError:  # the engine has ended
        return


def _compute(pipe: Connection, board: StepBoard, loaded: LoadedNetwork, options: EngineOptions, pool: Pool) -> None:
    blocks = KvBlocks(loaded.kv_layout, num_blocks=pool.num_blocks, block_size=pool.block_size, device=loaded.device)
    attention = make_attention(options.attention_backend, blocks, loaded.attention)
    fresh = make_sdpa(blocks, loaded.attention)
    with torch.inference_mode():
        if loaded.adapted is not None:
            loaded.adapted.allocate()
        while True:
            packed = pipe.recv_bytes()
            adapted = loaded.adapted
            if packed[:1] == _STEP:
                input_ids, positions, batch, slots, ends = board.read(bytearray(memoryview(packed)[1:]))
                step = StepContext(
                    positions=torch.from_numpy(positions).to(loaded.device),
                    attention=attention,
                    inputs=attention.prepare(batch),
                    adapters=adapted.step(slots, ends) if adapted is not None and slots else None,
                )
                loaded.network(torch.from_numpy(input_ids).to(loaded.device), step)
                continue
            message: Embedding | Placing = pickle.loads(packed[1:])  # noqa: S301 - of the engine's own process
            if isinstance(message, Placing):
                assert adapted is not None, "ranks have the same options"
                adapted.place(message.slot, message.adapter)
            else:
                bounds = [0, sum(map(len, message.token_id_lists))]
                adapters = None
                if adapted is not None and message.has_adapter:
                    adapters = adapted.step([EMBEDDING_SLOT], bounds)
                compute_fresh(loaded.network, fresh, message.token_id_lists, loaded.device, adapters=adapters)
