"""The pictures of one prompt: which of its tokens they take the places of, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A picture as the network sees it: `embeddings` [rows, hidden_size], in the places of that many tokens.

    `digest` is that of its file. `expansion` is the text in the place of the template's placeholder, with the picture's
    token once per row. `grid` are the rows' times, heights and widths, where positions depend on them. `deepstack`
    has as many rows for each of the first layers, which are added to what these layers give.
    """

    digest: bytes
    embeddings: torch.Tensor
    expansion: str
    grid: tuple[int, int, int] | None = None
    deepstack: tuple[torch.Tensor, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.embeddings)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.embeddings, *self.deepstack))


class PromptPictures:
    """Pictures in the order of a prompt of `num_tokens` tokens. `rows` are the places of their embeddings.

    `sees_whole`: each token of a picture sees all of that picture, so that a step computes it whole. `runs` are then
    the first and the last but one place of each.

    `rope_positions` [3, tokens] are the positions by time, height and width, where pictures have grids, and else None.
    Tokens after the prompt have their place plus `rope_shift` as position.
    """

    def __init__(
        self, pictures: Sequence[Picture], rows: IntArray, num_tokens: int, *, sees_whole: bool = False
    ) -> None:
        assert sum(picture.num_rows for picture in pictures) == len(rows), "each row has its place"
        self.rows = rows
        self.embeddings = torch.cat([picture.embeddings for picture in pictures])
        self.deepstack = tuple(
            torch.cat(layer) for layer in zip(*(picture.deepstack for picture in pictures), strict=True)
        )
        ends = np.cumsum([picture.num_rows for picture in pictures]).tolist()
        self._spans = [
            (int(rows[first]), int(rows[last - 1]) + 1, picture.digest)
            for (first, last), picture in zip(pairwise([0, *ends]), pictures, strict=True)
        ]
        self.runs = _runs(rows) if sees_whole else []
        self.rope_positions: IntArray | None = None
        self.rope_shift = 0
        if pictures[0].grid is not None:
            self.rope_positions = _grid_positions(pictures, rows, num_tokens)
            self.rope_shift = int(self.rope_positions[:, -1].max()) + 1 - num_tokens

    def block_key(self, start: int, stop: int) -> bytes:
        """What the places [start, stop) show of pictures: two blocks of equal tokens and keys have equal contents."""
        return b"".join(
            digest + (start - first).to_bytes(8, "little", signed=True)
            for first, last, digest in self._spans
            if first < stop and start < last
        )

    def whole_until(self, stop: int) -> int:
        """The last place up to `stop` at which a step may end without cutting a run."""
        return next((first for first, last in self.runs if first < stop < last), stop)


def place_pictures(
    pictures: Sequence[Picture], token_ids: Sequence[int], token_id: int, *, sees_whole: bool = False
) -> PromptPictures | None:
    """The pictures in the places of `token_id`; None if there are more or fewer places than rows."""
    ids = np.asarray(token_ids, dtype=np.int64)
    rows = np.flatnonzero(ids == token_id)
    if len(rows) != sum(picture.num_rows for picture in pictures):
        return None
    return PromptPictures(pictures, rows, len(ids), sees_whole=sees_whole)


def _runs(rows: IntArray) -> list[tuple[int, int]]:
    borders = np.flatnonzero(np.diff(rows) > 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, borders)]


def _grid_positions(pictures: Sequence[Picture], rows: IntArray, num_tokens: int) -> IntArray:
    """Text goes on from the highest position before it. A picture's rows count time, height and width from there."""
    found = np.empty((3, num_tokens), dtype=np.int64)
    place = position = first = 0
    for picture in pictures:
        assert picture.grid is not None, "all pictures of a family have grids, or none"
        start, stop = int(rows[first]), int(rows[first]) + picture.num_rows
        found[:, place:start] = np.arange(position, position + start - place)
        position += start - place
        found[:, start:stop] = np.indices(picture.grid).reshape(3, -1) + position
        position += max(picture.grid)
        place, first = stop, first + picture.num_rows
    found[:, place:] = np.arange(position, position + num_tokens - place)
    return found
