"""A step's plan as the flat arrays that a network takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from .attention.paged import AttentionBatch
from .block_tables import BlockTables
from .plan import Chunk

_START = itemgetter(1)
_NO_TABLES = np.empty((0, 0), dtype=np.int64)


class StepInputs:
    """A plan as flat arrays: decodes first, the longest first, then the chunks of more tokens.

    `sequences` are those of the rows' chunks. `sampled` has the chunks that give tokens, in the order of the plan;
    `sampled_rows` the rows that give them, None if those are all rows in order. `unread_rows` are those whose token is
    on the device only, `unread_slots` those of their sequences. `rope_positions` [tokens] or [3, tokens] are the
    positions that rotations turn by. `scored`: chunks whose prompt's log-probabilities are asked for, and where their
    rows begin. `drafts`: by seq_id, those that the rows of a chunk end with.
    With adapters, rows of one adapter lie side by side; `adapter_slots` are those of the runs, which end at
    `adapter_bounds`; none if no row has an adapter. `num_decodes`, `num_queries`, `lens` and `slots` are those of
    `batch`. `tables` are kept from step to step, `table_rows` [sequences] are their rows in it; without them the step
    makes its own.
    """

    __slots__ = (
        "_batch",
        "adapter_bounds",
        "adapter_slots",
        "block_size",
        "drafts",
        "input_ids",
        "lens",
        "num_decodes",
        "num_queries",
        "positions",
        "rope_positions",
        "sampled",
        "sampled_rows",
        "scored",
        "sequences",
        "slots",
        "table_rows",
        "tables",
        "unread_rows",
        "unread_slots",
    )

    def __init__(
        self,
        chunks: Sequence[Chunk],
        block_size: int,
        *,
        has_adapters: bool = False,
        tables: BlockTables | None = None,
    ) -> None:
        # One loop without calls per sequence: this is what the host does for every token of every step.
        ordered = sorted(chunks, key=_order_by_adapter) if has_adapters else _ordered(chunks)
        self.adapter_slots, self.adapter_bounds = _runs(ordered) if has_adapters else ([], [])
        self.num_decodes = sum([chunk[2] == 1 for chunk in chunks])
        input_ids: list[int] = []
        positions: list[int] = []
        self.unread_rows: list[int] = []
        self.unread_slots: list[int] = []
        self.scored: list[tuple[Chunk, int]] = []
        self.drafts: dict[int, list[int]] = {}
        last_rows: dict[int, int] = {}
        for chunk in ordered:
            sequence, start, num_tokens, num_sampled = chunk
            row = len(input_ids)
            token_ids = sequence.token_ids
            if num_tokens == 1:
                input_ids.append(token_ids[start] if start < len(token_ids) else 0)
                positions.append(start)
            else:
                known = token_ids[start : start + num_tokens]
                input_ids += known
                if len(known) < num_tokens:
                    if num_sampled > 1:
                        self.drafts[sequence.seq_id] = drafts = sequence.drafts[: num_sampled - 1]
                        input_ids += drafts
                    else:
                        input_ids.append(0)
                positions += range(start, start + num_tokens)
            end = start + num_tokens
            if end > len(token_ids) and num_sampled < 2:
                self.unread_rows.append(len(input_ids) - 1)
                self.unread_slots.append(sequence.slot)
            if num_sampled:
                last_rows[sequence.seq_id] = len(input_ids) - 1
            if sequence.params.prompt_logprobs is not None and start < sequence.num_prompt_tokens - 1:
                self.scored.append((chunk, row))
        num_rows = len(input_ids)
        self.block_size = block_size
        self.sequences = [chunk[0] for chunk in ordered]
        self.input_ids = np.array(input_ids, dtype=np.int64)
        self.positions = self.rope_positions = np.array(positions, dtype=np.int64)
        self.sampled = [chunk for chunk in chunks if chunk[3]]
        rows = [last_rows[chunk[0].seq_id] for chunk in self.sampled]
        if any(chunk[3] > 1 for chunk in self.sampled):
            ends = [row + 1 for row in rows]
            rows = [row for chunk, end in zip(self.sampled, ends, strict=True) for row in range(end - chunk[3], end)]
        self.sampled_rows = None if rows == list(range(num_rows)) else np.array(rows, dtype=np.int64)
        if self.num_decodes == num_rows:
            self.num_queries, self.lens = np.ones(num_rows, dtype=np.int64), self.positions + 1
        else:
            self.num_queries = np.array([chunk[2] for chunk in ordered], dtype=np.int64)
            self.lens = np.array([chunk[1] for chunk in ordered], dtype=np.int64) + self.num_queries
        num_blocks = -(-self.lens // block_size)
        if tables is None:
            tables = BlockTables()
            self.table_rows = tables.take_apart(self.sequences, num_blocks)
        else:
            self.table_rows = tables.take(self.sequences, num_blocks)
        self.tables = tables
        rows_of_tokens = self.table_rows
        if num_rows > len(ordered):
            rows_of_tokens = np.repeat(rows_of_tokens, self.num_queries)
        blocks = tables.rows[rows_of_tokens, self.positions // block_size]
        self.slots = blocks * block_size + self.positions % block_size
        self._batch: AttentionBatch | None = None

    @property
    def batch(self) -> AttentionBatch:
        """The sequences as attention takes them. Made when it is first asked for, while the step is launched: steps in
        graphs have no use for it."""
        if self._batch is None:
            width = -(-int(self.lens.max()) // self.block_size)
            self._batch = replace(self.batch_without_tables, block_tables=self.tables.rows[self.table_rows, :width])
        return self._batch

    @property
    def batch_without_tables(self) -> AttentionBatch:
        """The same where block tables are on the device."""
        return AttentionBatch(
            num_decodes=self.num_decodes,
            num_queries=self.num_queries,
            lens=self.lens,
            block_tables=_NO_TABLES,
            slots=self.slots,
        )

    @property
    def num_drafts(self) -> list[int]:
        """Of `sequences`; empty where none has any."""
        drafts = self.drafts
        return [len(drafts.get(sequence.seq_id, ())) for sequence in self.sequences] if drafts else []

    @property
    def sequence_slots(self) -> list[int]:
        """Of `sequences`."""
        return [sequence.slot for sequence in self.sequences]


def _ordered(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Decodes, then chunks of more tokens; those of the longest sequences first, of both."""
    decodes = [chunk for chunk in chunks if chunk[2] == 1]
    decodes.sort(key=_START, reverse=True)
    if len(decodes) < len(chunks):
        decodes += sorted([chunk for chunk in chunks if chunk[2] > 1], key=_order_of_prompts)
    return decodes


def _order_of_prompts(chunk: Chunk) -> tuple[int, int]:
    """Of those that begin, neighbours are about as long: layers that keep states pad them to one length."""
    return -chunk[1], chunk[2]


def _order_by_adapter(chunk: Chunk) -> tuple[bool, int, int]:
    """Rows with adapters lie between those without: the decodes' rows behind them, those of longer chunks before."""
    slot = chunk.sequence.adapter_slot
    return chunk.num_tokens > 1, -slot if chunk.num_tokens > 1 else slot, -chunk.start


def _runs(ordered: Sequence[Chunk]) -> tuple[list[int], list[int]]:
    """The slot of each run of rows, -1 without an adapter, and where the runs begin and the last one ends.

    None if no row has an adapter.
    """
    slots: list[int] = []
    bounds: list[int] = [0]
    for chunk in ordered:
        slot = chunk[0].adapter_slot
        end = bounds[-1] + chunk[2]
        if slots and slots[-1] == slot:
            bounds[-1] = end
        else:
            slots.append(slot)
            bounds.append(end)
    return ([], []) if slots == [-1] else (slots, bounds)
