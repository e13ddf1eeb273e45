"""Decode steps as CUDA graphs: network, logits and sampling of the common case are launched by one call.

Batches are padded to a few sizes; rows of padding have no tokens and no slots, so they touch nothing. Graphs are
captured while a model is loaded, or when a batch of their size first comes. After a capture that failed, no other is
tried: steps that have no graph are computed without one.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .attention.paged import DeviceInputs, IntArray
from .cuda_graphs import Capture, Captured, capture_each, measure_each
from .draw import NUM_DRAW_COLUMNS, draw_columns, draw_on_device, uniforms
from .lora.step import TILE_ROWS, CapturedAdapters, most_tiles, tile_table
from .sequence import Sequence as TokenSequence
from .step_context import StepContext
from .step_inputs import StepInputs

logger = logging.getLogger(__name__)

# Of each row: input id, position, slot, length; then rows that are sampled; then rows whose token is not read yet, and
# where it is.
_NUM_COLUMNS = 7


class Ending(enum.Enum):
    """How a captured step draws from its logits: the first kind that serves all of its rows."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    LOGITS = "logits"  # the sampler goes on from there


# Of a graph: rows, ending, and whether rows have adapters.
_Key = tuple[int, Ending, bool]


class CapturedDecode:
    """`width`: blocks of the longest sequence. The inputs lie in static memory, for `max_num_seqs` rows.

    Steps whose rows have some of `num_adapters` adapters are graphs of their own, so that others pay nothing for them.
    """

    def __init__(
        self,
        network: Any,
        attention: Any,
        *,
        device: torch.device,
        max_num_seqs: int,
        width: int,
        num_adapters: int = 0,
        capture: Capture,
    ) -> None:
        self._network = network
        self._attention = attention
        self._capture = capture
        self._sizes = batch_sizes(max_num_seqs)
        most = self._sizes[-1]
        self._columns = torch.zeros(_NUM_COLUMNS * most, dtype=torch.int64, device=device)
        self._tables = torch.zeros(most, width, dtype=torch.int32, device=device)
        self._draws = torch.zeros(NUM_DRAW_COLUMNS * most, dtype=torch.float64, device=device)
        self._num_adapters = num_adapters
        self._kinds = (False, True) if num_adapters else (False,)
        self._tiles = torch.full((most_tiles(most, num_adapters), 3), -1, dtype=torch.int32, device=device)
        # Two of each: the device may still read one while the next step is written.
        targets = (self._columns, self._tables, self._draws, self._tiles)
        self._staged = [[_pinned(torch.zeros_like(target, device="cpu"), device) for target in targets] for _ in "ab"]
        # Whose parameters the draws of the step before have: they change only with the batch.
        self._drawn: list[TokenSequence] = []
        self._drawn_columns = np.empty((NUM_DRAW_COLUMNS, 0))
        # Those of the step before, and its ending if none of them could get another.
        self._ended: tuple[list[TokenSequence], Ending] = [], Ending.LOGITS
        self._turn = 0
        self._captured: dict[_Key, Captured] = {}
        self._has_failed = False

    def can_run(self, step: StepInputs) -> bool:
        return step.batch.num_decodes == len(step.batch.lens) <= self._sizes[-1]

    def capture_all(self) -> None:
        """Capture every graph, the largest first, whose memory the others share."""
        capture_each(f"graphs of decode steps of up to {self._sizes[-1]} sequences", self._captures())

    def measure(self, used: Callable[[], int]) -> int:
        """The bytes that all graphs will take, see `measure_each`."""
        return measure_each(self._captures(), len(Ending) * len(self._kinds), used)

    def _captures(self) -> list[Callable[[], bool]]:
        self._draws.fill_(1.0)
        return [
            partial(self._capture_empty, (size, ending, has_adapters))
            for size in reversed(self._sizes)
            for has_adapters in self._kinds
            for ending in Ending
        ]

    def _capture_empty(self, key: _Key) -> bool:
        """Capture with inputs that have no tokens; whether that succeeded."""
        columns = _by_column(self._columns, key[0]).zero_()
        columns[2].fill_(-1)
        return self._graph(key) is not None

    def run(
        self, step: StepInputs, unread: IntArray, last_token_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, Ending] | None:
        """Token ids [sampled rows], or logits [sampled rows, vocabulary], in the order of the plan; valid until the
        next run. None if the step has no graph, and none can be captured.

        `unread` [2, n]: rows whose token only the device knows, and its place in `last_token_ids`.
        """
        count = len(step.batch.lens)
        size = next(size for size in self._sizes if size >= count)
        sequences, ending = self._ended
        if ending is Ending.LOGITS or sequences != step.sequences:
            ending = ending_of(step.sequences)
            self._ended = step.sequences, ending
        key = size, ending, bool(step.adapter_slots)
        if self._has_failed and key not in self._captured:
            return None
        staged = self._staged[self._turn]
        self._turn = 1 - self._turn
        self._stage(staged[0], staged[1], step, size, unread)
        if unread.size:
            assert last_token_ids is not None, "a sequence awaits a token that no step has sampled"
            columns = _by_column(self._columns, size)
            rows, sources = columns[5:, : unread.shape[1]]
            columns[0][rows] = last_token_ids[sources]
        if ending is Ending.DRAWN:
            self._stage_draws(staged[2], step, size)
        if step.adapter_slots:
            self._stage_tiles(staged[3], step, size)
        captured = self._graph(key)
        if captured is None:
            return None
        captured.replay()
        if step.sampled_rows is None:
            return captured.output[:count], ending
        return captured.output[_by_column(self._columns, size)[4, : len(step.sampled_rows)]], ending

    def _graph(self, key: _Key) -> Captured | None:
        captured = self._captured.get(key)
        if captured is None and not self._has_failed:
            try:
                captured = self._captured[key] = self._capture(lambda: self._compute(*key))
            except RuntimeError as error:  # out of memory, or what a graph cannot hold
                self._has_failed = True
                logger.warning("steps of %d sequences are computed without CUDA graphs: %s", key[0], error)
        return captured

    def _stage(
        self, columns: torch.Tensor, tables: torch.Tensor, step: StepInputs, size: int, unread: IntArray
    ) -> None:
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

    def _stage_draws(self, staged: torch.Tensor, step: StepInputs, size: int) -> None:
        sequences = step.sequences
        if self._drawn != sequences:
            params = [sequence.params for sequence in sequences]
            self._drawn, self._drawn_columns = sequences, draw_columns(params, [0.0] * len(params))
        used = staged[: NUM_DRAW_COLUMNS * size]
        view = used.view(NUM_DRAW_COLUMNS, size).numpy()
        view[:, : len(sequences)] = self._drawn_columns
        view[4, : len(sequences)] = uniforms([sequence.seed for sequence in sequences], step.positions + 1)
        view[:, len(sequences) :] = 1.0  # of padding: greedy, at any temperature but zero
        self._draws[: len(used)].copy_(used, non_blocking=True)

    def _stage_tiles(self, staged: torch.Tensor, step: StepInputs, size: int) -> None:
        used = staged[: most_tiles(size, self._num_adapters)]
        view = used.fill_(-1).numpy()
        found = tile_table(step.adapter_slots, step.adapter_bounds, TILE_ROWS)
        view[: len(found)] = found
        self._tiles[: len(used)].copy_(used, non_blocking=True)

    def _compute(self, size: int, ending: Ending, has_adapters: bool) -> torch.Tensor:
        input_ids, positions, slots, lens = _by_column(self._columns, size)[:4]
        inputs = DeviceInputs(size, slots, lens, self._tables[:size])
        adapters = CapturedAdapters(self._tiles[: most_tiles(size, self._num_adapters)]) if has_adapters else None
        step = StepContext(positions=positions, attention=self._attention, inputs=inputs, adapters=adapters)
        logits = self._network.logits(self._network(input_ids, step))
        if ending is Ending.LOGITS:
            return logits
        if ending is Ending.GREEDY:
            return logits.argmax(dim=-1)
        return draw_on_device(logits, self._draws[: NUM_DRAW_COLUMNS * size].view(NUM_DRAW_COLUMNS, size))


def _pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that `device` may read while the host goes on."""
    return values if device.type == "cpu" else values.pin_memory()


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
            ending = Ending.DRAWN
    return ending


def batch_sizes(most: int) -> list[int]:
    """Sizes that batches are padded to: dense where a row more costs most."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(576, 4097, 64)]
    return [*(size for size in sizes if size < most), next((size for size in sizes if size >= most), most)]
