"""The process of a rank other than rank 0, see `tensor_parallel`: it joins, loads its share, and follows."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from .attention.choose import make_attention
from .attention.chunked import make_sdpa
from .attention.kv_blocks import KvBlocks
from .block_tables import DeviceTables, bring_step, device_tables
from .captured_decode import CapturedDecode, captured_decode
from .captured_pieces import CapturedPieces, captured_pieces
from .checkpoint import open_checkpoint
from .compute_thread import share_of_threads
from .cuda_graphs import CudaGraphs
from .kv_memory import available_bytes
from .lora.step import EMBEDDING_SLOT
from .models.linear_tensors import Rank
from .models.load import LoadedNetwork, load_network
from .nodes import MOST_BYTES, connect_rank, die_with_parent, local_address, watch
from .options import EngineOptions
from .profile import CudaMemory
from .rank_messages import (
    CAPTURE,
    CAPTURE_PIECES,
    GRAPH,
    STEP,
    Beat,
    Embedding,
    Measure,
    Membership,
    Message,
    Placing,
    Pool,
    membership_of,
    unpacked,
)
from .step_board import NO_ROWS, StepBoard
from .step_context import StepContext, compute_fresh
from .tensor_parallel import join, rank_options

# To rank 0: all is well.
_SIGN = b""


def follow(descriptor: int, board: int) -> None:
    """The main function of the other ranks' processes."""
    with Connection(descriptor) as pipe:
        membership = membership_of(pipe.recv_bytes())
        watch([pipe], lambda _: os._exit(0))  # the engine has ended, even while a sum waits for it
        _follow(pipe, membership, StepBoard(board))


def join_from_afar(host: str, port: str, rank: str, token: str, parent: str) -> None:
    """The main function of ranks on other machines than the leader's; the process `parent` started this one."""
    die_with_parent(int(parent))
    with connect_rank(host, int(port), int(rank), token) as pipe:
        watch([pipe], lambda _: os._exit(0))  # the engine has ended, even while a sum waits for it
        try:
            _follow(pipe, membership_of(pipe.recv_bytes(), host), StepBoard(-1), local_address(pipe))
        except Exception as error:
            pipe.send_bytes(f"{type(error).__name__}: {error}".encode()[:MOST_BYTES])
            raise


def _follow(pipe: Connection, membership: Membership, board: StepBoard, address: str = "") -> None:
    options = rank_options(membership.options, membership.index)
    torch.set_num_threads(options.num_threads or share_of_threads(options))
    pipe.send_bytes(_SIGN)  # about to join
    pulse = _Pulse(pipe)
    rank = pulse.count(join(membership, options.device, address=address))
    with open_checkpoint(membership.place) as checkpoint:
        loaded = load_network(checkpoint, options, rank)
    pipe.send_bytes(_SIGN)  # ready to compute
    try:
        with torch.inference_mode():
            if loaded.adapted is not None:
                loaded.adapted.allocate()
            share = _Share(pipe, pulse, board, loaded, options)
            while True:
                data = pipe.recv_bytes()
                pulse.progress += 1
                share.take(data)
    except EOFError:  # the engine has ended
        return


class _Pulse:
    """Tells rank 0 again and again, in a thread, that this process runs, and how far it is.

    `progress` counts the messages and the sums that the rank has begun; on GPUs messages alone, as graphs call nothing.
    All ranks have the same when none has work. In a sum that does not end, those that others wait for have less.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.progress = 0

    def count(self, rank: Rank) -> Rank:
        """The same with its sums counted."""
        if rank.abort is not None:
            return rank

        def add_up(part: torch.Tensor) -> torch.Tensor:
            self.progress += 1
            return rank.sum(part)

        return replace(rank, sum=add_up)

    def start(self, interval_s: float) -> None:
        threading.Thread(target=self._beat, args=(interval_s,), name="rank-pulse", daemon=True).start()

    def _beat(self, interval_s: float) -> None:
        with suppress(OSError):  # rank 0 has ended
            while True:
                self._pipe.send_bytes(b"%d" % self.progress)
                time.sleep(interval_s)


class _Share:
    """A rank's share of a network, and its KV blocks."""

    def __init__(
        self, pipe: Connection, pulse: _Pulse, board: StepBoard, loaded: LoadedNetwork, options: EngineOptions
    ) -> None:
        self._pipe = pipe
        self._pulse = pulse
        self._board = board
        self._loaded = loaded
        self._options = options
        self._attention: Any = None
        self._fresh: Any = None
        self._tables: DeviceTables | None = None
        self._captured: CapturedDecode | None = None
        self._pieces: CapturedPieces | None = None
        self._memory = CudaMemory(loaded.device) if loaded.device.type == "cuda" else None
        # What the largest step takes, and what was in use before graphs were captured.
        self._step_bytes = self._began_bytes = 0

    def take(self, data: bytes) -> None:
        """Do what a message of rank 0 says."""
        kind = data[:1]
        if kind == STEP:
            self._step(bytearray(memoryview(data)[1:]))
        elif kind == GRAPH:
            size, has_adapters, words = self._board.read_words(bytearray(memoryview(data)[1:]))
            assert self._captured is not None, "ranks have the same options"
            self._captured.follow(size, has_adapters, words)
        elif kind in (CAPTURE, CAPTURE_PIECES):
            size, has_adapters = np.frombuffer(bytearray(data[1:]), dtype=np.int64).tolist()
            graphs = self._captured if kind == CAPTURE else self._pieces
            assert graphs is not None, "ranks have the same options"
            graphs.follow_capture(size, bool(has_adapters))
        else:
            self._take_other(unpacked(data))

    def _take_other(self, message: Message) -> None:
        adapted = self._loaded.adapted
        if isinstance(message, Pool):
            self._open(message)
        elif isinstance(message, Measure):
            self._measure(message.phase)
        elif isinstance(message, Beat):
            self._pulse.start(message.interval_s)
        elif isinstance(message, Placing):
            assert adapted is not None, "ranks have the same options"
            adapted.place(message.slot, message.adapter)
        else:
            assert isinstance(message, Embedding), "nothing else comes"
            adapters = None
            if adapted is not None and message.has_adapter:
                adapters = adapted.step([EMBEDDING_SLOT], [0, sum(map(len, message.token_id_lists))])
            compute_fresh(
                self._loaded.network, self._fresh, message.token_id_lists, self._loaded.device, adapters=adapters
            )

    def _open(self, pool: Pool) -> None:
        loaded, options = self._loaded, self._options
        self._give_up()
        blocks = KvBlocks(
            loaded.kv_layout, num_blocks=pool.num_blocks, block_size=pool.block_size, device=loaded.device
        )
        self._attention = make_attention(options.attention_backend, blocks, loaded.attention)
        self._fresh = make_sdpa(blocks, loaded.attention)
        graphs = CudaGraphs()
        self._tables = device_tables(self._attention, blocks, options.max_num_seqs, loaded.max_model_len)
        self._captured = captured_decode(loaded, self._attention, options, self._tables, graphs)
        self._pieces = captured_pieces(loaded, self._attention, options, blocks, graphs)

    def _give_up(self) -> None:
        """What is on the blocks, before they are others."""
        self._attention = self._fresh = self._tables = self._captured = self._pieces = None

    def _measure(self, phase: str) -> None:
        memory = self._memory
        if memory is None:
            left = available_bytes(self._loaded.device, self._options.gpu_memory_utilization)
        elif phase == "step":
            return memory.begin()
        elif phase == "graphs":
            self._step_bytes, self._began_bytes = memory.peak(), memory.used()
            return None
        else:
            graphs = max(0, memory.used() - self._began_bytes)
            self._give_up()
            memory.used()  # gives back what nothing holds
            left = available_bytes(self._loaded.device, self._options.gpu_memory_utilization)
            left -= self._step_bytes + graphs
        if phase == "end":
            self._pipe.send_bytes(b"%d" % left)
        return None

    def _step(self, written: bytearray) -> None:
        step = self._board.read(written)
        loaded, adapted = self._loaded, self._loaded.adapted
        pieces = self._pieces if step.size else None
        adapters, words = None, NO_ROWS
        if adapted is not None and step.adapter_slots:
            adapters = adapted.step(step.adapter_slots, step.adapter_bounds)
            words = adapters.words() if pieces is None else pieces.words_of(step.size, adapters)
        inputs, (input_ids, positions, tiles) = bring_step(
            self._attention,
            step.batch,
            [step.input_ids, step.positions, words],
            loaded.device,
            self._tables,
            step.change,
        )
        if pieces is not None:
            pieces.run(step.size, input_ids, positions, inputs, None if adapters is None else tiles)
            return
        if adapters is not None:
            adapters.put(tiles)
        context = StepContext(positions=positions, attention=self._attention, inputs=inputs, adapters=adapters)
        loaded.network(input_ids, context)
