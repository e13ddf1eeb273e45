"""Decode steps as CUDA graphs: network, logits and sampling of the common case are launched by one call.

Batches are padded to a few sizes; rows of padding have no tokens and no slots, so they touch nothing. Graphs are
captured while a model is loaded, or when a batch of their size first comes. After a capture that failed, no other is
tried: steps that have no graph are computed without one.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .attention.paged import DeviceInputs, IntArray, copied_together
from .block_tables import DeviceTables
from .cuda_graphs import Capture, Captured, CudaGraphs, capture_each, measure_each
from .draw import NUM_DRAW_COLUMNS, DrawColumns, draw_columns, draw_on_device, uniforms
from .lora.step import TILE_ROWS, CapturedAdapters, most_tiles, tile_table
from .sequence import Sequence as TokenSequence
from .step_context import StepContext
from .step_inputs import StepInputs

if TYPE_CHECKING:
    from .attention.paged import PagedAttention
    from .models.load import LoadedNetwork
    from .options import EngineOptions

logger = logging.getLogger(__name__)

# Of each row: input id, position, where its keys go, length, the sequence's slot; then rows that are sampled; then rows
# whose token is not read yet, and where it is.
_NUM_COLUMNS = 8
# Of a row of padding: its keys go nowhere, and it sees nothing.
_PADDING = np.array([[0], [0], [-1], [0]])
# Blocks that a step may have anew per row. A block is full after 16 tokens or more, so only new sequences have many.
_CHANGES_PER_ROW = 8


class Ending(enum.Enum):
    """How a captured step draws from its logits: the first kind that serves all of its rows."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    LOGITS = "logits"  # the sampler goes on from there
    HIDDEN = "hidden"  # of ranks that sample nothing


# Those of an engine's own process.
SAMPLED_ENDINGS = (Ending.GREEDY, Ending.DRAWN, Ending.LOGITS)


# Of a graph: rows, ending, and whether rows have adapters.
_Key = tuple[int, Ending, bool]


@dataclass(frozen=True, slots=True)
class Leading:
    """How rank 0 leads the other ranks: to the capture of a graph, by its rows and whether they have adapters; to a
    step in it, by what the step brings to the device."""

    capture: Callable[[int, bool], None]
    step: Callable[[int, bool, IntArray], None]


class CapturedDecode:
    """Of a step all that is new goes to the device by one copy. Block tables stay there, by slots, and a step sends the
    blocks that they lack. Steps whose rows have some of `num_adapters` adapters are graphs of their own, so that others
    pay nothing for them.

    Where ranks share a network, each has these graphs. `leads` has rank 0: it says what the others do next, by `follow`
    and `follow_capture`, before it does the same. So all ranks take the same sums, whoever of them has graphs.
    """

    def __init__(
        self,
        network: Any,
        attention: Any,
        *,
        device: torch.device,
        max_num_seqs: int,
        tables: DeviceTables,
        num_adapters: int = 0,
        capture: Capture,
        leads: Leading | None = None,
    ) -> None:
        self._network = network
        self._attention = attention
        self._capture = capture
        self._leads = leads
        self._sizes = batch_sizes(max_num_seqs)
        self._num_adapters = num_adapters
        self._kinds = (False, True) if num_adapters else (False,)
        most = self._sizes[-1]
        self._room = _CHANGES_PER_ROW * most
        num_words = _Layout(most, num_adapters).num_words + 2 * self._room
        self._static = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._tables = tables
        # Two: the device may still read one while the next step is written.
        self._staged = [_pinned(torch.zeros(num_words, dtype=torch.int64), device) for _ in "ab"]
        # Whose parameters the draws of the step before have: they change only with the batch.
        self._drawn: list[TokenSequence] = []
        self._drawn_columns = np.empty((NUM_DRAW_COLUMNS, 0))
        # Those of the step before, and its ending if none of them could get another.
        self._ended: tuple[list[TokenSequence], Ending] = [], Ending.LOGITS
        self._turn = 0
        self._captured: dict[_Key, Captured] = {}
        self._has_failed = False

    def can_run(self, step: StepInputs) -> bool:
        return step.num_decodes == len(step.lens) <= self._sizes[-1]

    def capture_all(self) -> None:
        """Capture every graph, the largest first, whose memory the others share."""
        capture_each(f"graphs of decode steps of up to {self._sizes[-1]} sequences", self._captures())

    def measure(self, used: Callable[[], int]) -> int:
        """The bytes that all graphs will take, see `measure_each`."""
        return measure_each(self._captures(), len(SAMPLED_ENDINGS) * len(self._kinds), used)

    def _captures(self) -> list[Callable[[], bool]]:
        return [
            partial(self._capture_empty, (size, ending, has_adapters))
            for size in reversed(self._sizes)
            for has_adapters in self._kinds
            for ending in SAMPLED_ENDINGS
        ]

    def _capture_empty(self, key: _Key) -> bool:
        """Capture with inputs that have no tokens; whether that succeeded."""
        if key in self._captured or self._has_failed:
            return key in self._captured
        self._empty(key[0])
        if self._leads is not None:
            self._leads.capture(key[0], key[2])
        return self._graph(key) is not None

    def _empty(self, size: int) -> None:
        """Static inputs without tokens."""
        columns, draws, tiles = _Layout(size, self._num_adapters).of(self._static)
        columns.zero_()
        columns[2].fill_(-1)
        draws.fill_(1.0)
        tiles.fill_(-1)

    def follow_capture(self, size: int, has_adapters: bool) -> None:
        """As another rank: compute once what rank 0 computes before it captures, and capture it."""
        key = size, Ending.HIDDEN, has_adapters
        self._empty(size)
        if key in self._captured or self._has_failed:
            self._compute(*key)
        else:
            self._graph(key)

    def follow(self, size: int, has_adapters: bool, words: IntArray) -> None:
        """As another rank: the step that rank 0 computes next; `words` are those that it sends to its device."""
        staged = self._next_staged()
        used = min(len(words), len(staged))
        staged.numpy()[:used] = words[:used]
        self._bring(size, staged, words)
        key = size, Ending.HIDDEN, has_adapters
        captured = self._captured.get(key)
        if captured is None:
            self._compute(*key)
        else:
            captured.replay()

    def run(
        self,
        step: StepInputs,
        unread: IntArray,
        last_token_ids: torch.Tensor | None,
        draws: Callable[[], DrawColumns | None],
    ) -> tuple[torch.Tensor, Ending, torch.Tensor | None] | None:
        """Token ids [sampled rows], or logits [sampled rows, vocabulary], in the order of the plan; valid until the
        next run. None if the step has no graph, and none can be captured.

        `unread` [2, n]: rows whose token only the device knows, and its place in `last_token_ids`. `draws` makes
        `draw_columns` of the sampled rows for whoever goes on from logits, None if none are needed; they come back on
        the device.
        """
        count = len(step.lens)
        size = next(size for size in self._sizes if size >= count)
        sequences, ending = self._ended
        if ending is Ending.LOGITS or sequences != step.sequences:
            ending = ending_of(step.sequences)
            self._ended = step.sequences, ending
        key = size, ending, bool(step.adapter_slots)
        if not self._capture_empty(key):
            return None
        captured = self._captured[key]
        drawn = draws() if ending is Ending.LOGITS else None
        columns, draw_columns = self._send(step, size, ending, unread, drawn)
        if unread.size:
            assert last_token_ids is not None, "a sequence awaits a token that no step has sampled"
            rows, sources = columns[6:, : unread.shape[1]]
            columns[0][rows] = last_token_ids[sources]
        captured.replay()
        output = captured.output[:count]
        if step.sampled_rows is not None:
            output = captured.output[columns[5, : len(step.sampled_rows)]]
        return output, ending, None if drawn is None else draw_columns[:, : drawn.shape[1]]

    def _graph(self, key: _Key) -> Captured | None:
        captured = self._captured.get(key)
        if captured is None and not self._has_failed:
            try:
                captured = self._captured[key] = self._capture(lambda: self._compute(*key))
            except RuntimeError as error:  # out of memory, or what a graph cannot hold
                self._has_failed = True
                logger.warning("steps of %d sequences are computed without CUDA graphs: %s", key[0], error)
        return captured

    def _send(
        self, step: StepInputs, size: int, ending: Ending, unread: IntArray, drawn: DrawColumns | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring what is new in a step to the device. The columns there, and those of draws."""
        layout = _Layout(size, self._num_adapters)
        staged = self._next_staged()
        columns, draws, tiles = (part.numpy() for part in layout.of(staged))
        count = len(step.lens)
        columns[:5, :count] = (step.input_ids, step.rope_positions, step.slots, step.lens, step.table_rows)
        columns[:4, count:] = _PADDING
        columns[4, count:] = len(self._tables.rows) - 1
        if step.sampled_rows is not None:
            columns[5, : len(step.sampled_rows)] = step.sampled_rows
        columns[6:, : unread.shape[1]] = unread
        if ending is Ending.DRAWN:
            self._put_draws(draws, step)
        elif drawn is not None:
            draws[:, : drawn.shape[1]] = drawn
        if step.adapter_slots:
            found = tile_table(step.adapter_slots, step.adapter_bounds, TILE_ROWS)
            tiles[: len(found)] = found
            tiles[len(found) :] = -1
        _, places, blocks = self._tables.take(step.tables, step.table_rows)
        used, numbers = layout.num_words, staged.numpy()
        end = used + 2 * len(places)
        if len(places) <= self._room:
            numbers[used:end] = np.concatenate((places, blocks))
            words = numbers[:end]
        else:
            words = np.concatenate((numbers[:used], places, blocks))
        if self._leads is not None:
            self._leads.step(size, bool(step.adapter_slots), words)
        self._bring(size, staged, words)
        return layout.of(self._static)[:2]

    def _next_staged(self) -> torch.Tensor:
        self._turn = 1 - self._turn
        return self._staged[self._turn]

    def _bring(self, size: int, staged: torch.Tensor, words: IntArray) -> None:
        """To the device: `words`, which `staged` has, if there is room for them."""
        used, end = _Layout(size, self._num_adapters).num_words, len(words)
        num_changes = (end - used) // 2
        if num_changes <= self._room:
            self._static[:end].copy_(staged[:end], non_blocking=True)
            self._tables.change(*self._static[used:end].view(2, num_changes))
        else:
            self._static[:used].copy_(staged[:used], non_blocking=True)
            self._tables.change(
                *copied_together([words[used : used + num_changes], words[used + num_changes :]], self._static.device)
            )

    def _put_draws(self, draws: DrawColumns, step: StepInputs) -> None:
        """`draws` [NUM_DRAW_COLUMNS, size]"""
        sequences = step.sequences
        if self._drawn != sequences:
            params = [sequence.params for sequence in sequences]
            self._drawn, self._drawn_columns = sequences, draw_columns(params, [0.0] * len(params))
        draws[:, : len(sequences)] = self._drawn_columns
        draws[4, : len(sequences)] = uniforms([sequence.seed for sequence in sequences], step.positions + 1)
        draws[:, len(sequences) :] = 1.0  # of padding: greedy, at any temperature but zero

    def _compute(self, size: int, ending: Ending, has_adapters: bool) -> torch.Tensor:
        columns, draws, tiles = _Layout(size, self._num_adapters).of(self._static)
        input_ids, positions, slots, lens, rows = columns[:5]
        inputs = DeviceInputs(size, slots, lens, self._tables.rows[rows])
        adapters = CapturedAdapters(tiles) if has_adapters else None
        step = StepContext(positions=positions, attention=self._attention, inputs=inputs, adapters=adapters)
        hidden: torch.Tensor = self._network(input_ids, step)
        if ending is Ending.HIDDEN:
            return hidden
        if ending is Ending.LOGITS:
            return self._network.logits(hidden)
        scores = self._network.scores(hidden)
        return scores.argmax(dim=-1) if ending is Ending.GREEDY else draw_on_device(scores, draws)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a step of `size` rows lies in static memory: columns, parameters of draws, tiles of adapters."""

    size: int
    num_adapters: int

    @property
    def num_words(self) -> int:
        """Of 8 bytes."""
        return (_NUM_COLUMNS + NUM_DRAW_COLUMNS) * self.size + -(-3 * self._num_tiles // 2)

    def of(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views: int64 [columns, size], float64 [columns of draws, size], int32 [tiles, 3]."""
        ends = _NUM_COLUMNS * self.size, (_NUM_COLUMNS + NUM_DRAW_COLUMNS) * self.size
        columns = words[: ends[0]].view(_NUM_COLUMNS, self.size)
        draws = words[ends[0] : ends[1]].view(torch.float64).view(NUM_DRAW_COLUMNS, self.size)
        tiles = words[ends[1] : self.num_words].view(torch.int32)[: 3 * self._num_tiles]
        return columns, draws, tiles.view(self._num_tiles, 3)

    @property
    def _num_tiles(self) -> int:
        return most_tiles(self.size, self.num_adapters) if self.num_adapters else 0


def captured_decode(
    loaded: LoadedNetwork,
    attention: PagedAttention,
    options: EngineOptions,
    tables: DeviceTables | None,
    graphs: CudaGraphs,
    leads: Leading | None = None,
) -> CapturedDecode | None:
    """The graphs of a network on the blocks of `tables`. None where its decode steps cannot be graphs of their own: the
    course of attention or of the network depends on values, or something reads its states between layers."""
    if tables is None or options.enforce_eager or options.has_trained_drafts or not loaded.is_capturable:
        return None
    return CapturedDecode(
        loaded.network,
        attention,
        device=loaded.device,
        max_num_seqs=options.max_num_seqs,
        tables=tables,
        num_adapters=0 if loaded.adapted is None else options.num_lora_slots,
        capture=graphs,
        leads=leads,
    )


def _pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that `device` may read while the host goes on."""
    return values if device.type == "cpu" else values.pin_memory()


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
