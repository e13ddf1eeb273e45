"""What of a step's rows is picture: rows that are computed from embeddings and not from token ids, and positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.picture_attention import PictureRun
from ..step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class StepPictures:
    """`embeddings` [n, hidden_size] take the places `rows` [n] of what token ids give.

    `deepstack` are as many rows for each of the first layers. `runs` are rows that see their pictures whole.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()
    runs: tuple[PictureRun, ...] = ()

    def put(self, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings of a step's tokens [tokens, hidden_size], changed in place."""
        return hidden.index_copy_(0, self.rows, self.embeddings.to(hidden.dtype))

    def add_deep(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """What a layer gave, with the pictures' rows of that layer added in place."""
        if layer >= len(self.deepstack):
            return hidden
        return hidden.index_add_(0, self.rows, self.deepstack[layer].to(hidden.dtype))


def take_pictures(step: StepInputs, device: torch.device) -> StepPictures | None:
    """The pictures among the rows of a step; None without any. Positions that depend on pictures are set in `step`."""
    seen = [index for index, sequence in enumerate(step.sequences) if sequence.pictures is not None]
    if not seen:
        return None
    _set_positions(step, seen)
    counts, lens = step.batch.num_queries, step.batch.lens
    offsets = np.cumsum(counts) - counts
    rows, parts = [], []
    runs: list[PictureRun] = []
    for index in seen:
        pictures = step.sequences[index].pictures
        assert pictures is not None, "it was chosen for them"
        stop = int(lens[index])
        start = stop - int(counts[index])
        first, last = np.searchsorted(pictures.rows, (start, stop)).tolist()
        if first < last:
            rows.append(pictures.rows[first:last] - start + int(offsets[index]))
            parts.append((pictures, first, last))
            runs += _runs(step, index, start, int(offsets[index]))
    if not rows:
        return None
    return StepPictures(
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.cat([pictures.embeddings[first:last] for pictures, first, last in parts]),
        tuple(
            torch.cat([pictures.deepstack[layer][first:last] for pictures, first, last in parts])
            for layer in range(len(parts[0][0].deepstack))
        ),
        tuple(runs),
    )


def _runs(step: StepInputs, index: int, start: int, offset: int) -> Iterator[PictureRun]:
    """Those of a sequence whose tokens from position `start` on are the rows from `offset` on."""
    pictures, batch = step.sequences[index].pictures, step.batch
    assert pictures is not None, "it was chosen for them"
    stop, block_size = int(batch.lens[index]), step.block_size
    for first, last in pictures.runs:
        if start < last and first < stop:
            assert last <= stop, "a step has all of a picture that is seen whole"
            yield PictureRun(
                start=offset + max(first, start) - start,
                stop=offset + last - start,
                end=last,
                block_ids=batch.block_tables[index, : -(-last // block_size)],
            )


def _set_positions(step: StepInputs, seen: list[int]) -> None:
    """Positions for rotations: [tokens] while all rows are behind pictures, else [3, tokens]."""
    counts, lens = step.batch.num_queries, step.batch.lens
    offsets = np.cumsum(counts) - counts
    positions = step.positions
    is_changed = False
    for index in seen:
        pictures = step.sequences[index].pictures
        assert pictures is not None, "it was chosen for them"
        if pictures.rope_positions is None:
            return
        if not is_changed:
            positions, is_changed = positions.copy(), True
        stop = int(lens[index])
        start, offset = stop - int(counts[index]), int(offsets[index])
        num_known = max(0, pictures.rope_positions.shape[1] - start)
        if num_known and positions.ndim == 1:
            positions = np.tile(positions, (3, 1))
        own = positions[..., offset : offset + stop - start]
        own[..., num_known:] += pictures.rope_shift
        if num_known:
            own[:, :num_known] = pictures.rope_positions[:, start:stop]
    step.rope_positions = positions
