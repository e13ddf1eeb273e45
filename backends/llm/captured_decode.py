"""Decode steps as CUDA graphs: network, logits and sampling of the common case are launched by one call.

Batches are padded to a few sizes; rows of padding have no tokens and no slots, so they touch nothing. Graphs are
captured while a model is loaded, or when a batch of their size first comes. After a capture that failed, no other is
tried: steps that have no graph are computed without one.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .attention.paged import DeviceInputs, IntArray
from .draw import DrawInputs, draw_on_device, uniform
from .sequence import Sequence as TokenSequence
from .step_context import StepContext
from .step_inputs import StepInputs

logger = logging.getLogger(__name__)

# Of each row: input id, position, slot, length; then rows that are sampled; then rows whose token is not read yet, and
# where it is.
_NUM_COLUMNS = 7
# Graphs after which a line says how far capturing has come.
_PROGRESS_GRAPHS = 20


class Ending(enum.Enum):
    """How a captured step draws from its logits: the first kind that serves all of its rows."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    SORTED = "sorted"  # a draw with top_k or top_p
    LOGITS = "logits"  # the sampler goes on from there


@dataclass(frozen=True, slots=True)
class Captured:
    """`replay` computes anew from what the static inputs hold, into `output`."""

    output: torch.Tensor
    replay: Callable[[], None]


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Captured:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()  # compiles kernels and fills caches, which a capture must not
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for other models.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        self._pool = graph.pool()
        return Captured(output, graph.replay)


class CapturedDecode:
    """`width`: blocks of the longest sequence. The inputs lie in static memory, for `max_num_seqs` rows."""

    def __init__(
        self,
        network: Any,
        attention: Any,
        *,
        device: torch.device,
        max_num_seqs: int,
        width: int,
        capture: Capture,
    ) -> None:
        self._network = network
        self._attention = attention
        self._capture = capture
        self._sizes = batch_sizes(max_num_seqs)
        most = self._sizes[-1]
        self._columns = torch.zeros(_NUM_COLUMNS * most, dtype=torch.int64, device=device)
        self._tables = torch.zeros(most, width, dtype=torch.int32, device=device)
        self._draws = torch.zeros(6, most, dtype=torch.float32, device=device)
        # Two of each: the device may still read one while the next step is written.
        self._staged = [
            (torch.zeros_like(self._columns, device="cpu"), torch.zeros_like(self._tables, device="cpu"))
            for _ in range(2)
        ]
        if device.type != "cpu":
            self._staged = [(columns.pin_memory(), tables.pin_memory()) for columns, tables in self._staged]
        self._turn = 0
        self._captured: dict[tuple[int, Ending], Captured] = {}
        self._has_failed = False

    def can_run(self, step: StepInputs) -> bool:
        return step.batch.num_decodes == len(step.batch.lens) <= self._sizes[-1]

    def capture_all(self) -> None:
        """Capture every graph, the largest first, whose memory the others share."""
        wanted = [(size, ending) for size in reversed(self._sizes) for ending in Ending]
        logger.info("capturing %d graphs of decode steps, of up to %d sequences", len(wanted), self._sizes[-1])
        began = time.monotonic()
        self._draws.fill_(1.0)
        for number, (size, ending) in enumerate(wanted, 1):
            columns = _by_column(self._columns, size).zero_()
            columns[2].fill_(-1)
            if self._graph(size, ending) is None:
                return
            if number % _PROGRESS_GRAPHS == 0 or number == len(wanted):
                logger.info("captured %d of %d graphs in %.1f s", number, len(wanted), time.monotonic() - began)

    def run(
        self, step: StepInputs, unread: IntArray, last_token_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, Ending] | None:
        """Token ids [sampled rows], or logits [sampled rows, vocabulary], in the order of the plan; valid until the
        next run. None if the step has no graph, and none can be captured.

        `unread` [2, n]: rows whose token only the device knows, and its place in `last_token_ids`.
        """
        count = len(step.batch.lens)
        size = next(size for size in self._sizes if size >= count)
        ending = ending_of(step.sequences)
        if self._has_failed and (size, ending) not in self._captured:
            return None
        self._stage(step, size, unread)
        if unread.size:
            assert last_token_ids is not None, "a sequence awaits a token that no step has sampled"
            columns = _by_column(self._columns, size)
            rows, sources = columns[5:, : unread.shape[1]]
            columns[0][rows] = last_token_ids[sources]
        if ending in (Ending.DRAWN, Ending.SORTED):
            self._stage_draws(step.sequences, (step.positions + 1).tolist())
        captured = self._graph(size, ending)
        if captured is None:
            return None
        captured.replay()
        if step.sampled_rows is None:
            return captured.output[:count], ending
        return captured.output[_by_column(self._columns, size)[4, : len(step.sampled_rows)]], ending

    def _graph(self, size: int, ending: Ending) -> Captured | None:
        captured = self._captured.get((size, ending))
        if captured is None and not self._has_failed:
            try:
                captured = self._captured[size, ending] = self._capture(lambda: self._compute(size, ending))
            except RuntimeError as error:  # out of memory, or what a graph cannot hold
                self._has_failed = True
                logger.warning("steps of %d sequences are computed without CUDA graphs: %s", size, error)
        return captured

    def _stage(self, step: StepInputs, size: int, unread: IntArray) -> None:
        columns, tables = self._staged[self._turn]
        self._turn = 1 - self._turn
        batch = step.batch
        count, width = batch.block_tables.shape
        view = _by_column(columns, size).numpy()
        view[:4, :count] = (step.input_ids, step.rope_positions, batch.slots, batch.lens)
        view[:2, count:size] = 0
        view[2, count:size] = -1
        view[3, count:size] = 0
        if step.sampled_rows is not None:
            view[4, : len(step.sampled_rows)] = step.sampled_rows
        view[5:, : unread.shape[1]] = unread
        tables.numpy()[:count, :width] = batch.block_tables
        # Without gaps: a copy of parts of rows would go through memory that is not pinned, and wait.
        used = _NUM_COLUMNS * size
        self._columns[:used].copy_(columns[:used], non_blocking=True)
        self._tables[:size].copy_(tables[:size], non_blocking=True)

    def _stage_draws(self, sequences: Sequence[TokenSequence], positions: Sequence[int]) -> None:
        params = [sequence.params for sequence in sequences]
        noise = [uniform(sequence.seed, position) for sequence, position in zip(sequences, positions, strict=True)]
        drawn = DrawInputs.of(params, noise, self._draws.device)
        rows = len(sequences)
        columns = (drawn.temperature, drawn.min_p, drawn.top_p, drawn.top_k, drawn.noise, drawn.is_greedy)
        for target, column in zip(self._draws, columns, strict=True):
            target[:rows] = column.squeeze(1)
        self._draws[0, rows:] = 1.0  # of padding: any temperature but zero

    def _compute(self, size: int, ending: Ending) -> torch.Tensor:
        input_ids, positions, slots, lens = _by_column(self._columns, size)[:4]
        inputs = DeviceInputs(size, slots, lens, self._tables[:size])
        step = StepContext(positions=positions, attention=self._attention, inputs=inputs)
        logits = self._network.logits(self._network(input_ids, step))
        if ending is Ending.LOGITS:
            return logits
        if ending is Ending.GREEDY:
            return logits.argmax(dim=-1)
        temperature, min_p, top_p, top_k, noise, is_greedy = (column[:size, None] for column in self._draws)
        is_sorted = ending is Ending.SORTED
        return draw_on_device(logits, DrawInputs(temperature, min_p, top_p, top_k, noise, is_greedy > 0, is_sorted))


def _by_column(values: torch.Tensor, size: int) -> torch.Tensor:
    """[columns, size]: each size of batches has the columns at places of its own."""
    return values[: _NUM_COLUMNS * size].view(_NUM_COLUMNS, size)


def ending_of(sequences: Sequence[TokenSequence]) -> Ending:
    """Rows whose logits are edited, constrained or reported need the sampler."""
    ending = Ending.GREEDY
    for sequence in sequences:
        params, state = sequence.params, sequence.sampler_state
        if state is None or state.is_edited or sequence.matcher is not None or params.logprobs is not None:
            return Ending.LOGITS
        if not params.is_greedy:
            if params.top_p < 1.0 or params.top_k > 0:
                ending = Ending.SORTED
            elif ending is Ending.GREEDY:
                ending = Ending.DRAWN
    return ending


def batch_sizes(most: int) -> list[int]:
    """Sizes that batches are padded to: dense where a row more costs most."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(576, 4097, 64)]
    return [*(size for size in sizes if size < most), next((size for size in sizes if size >= most), most)]
