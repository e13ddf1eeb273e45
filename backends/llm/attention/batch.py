"""Where the tokens of one step stand: what every implementation of attention prepares itself from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences in the order of their rows: first `num_decodes` that add one token each, then those that add more.

    Decodes are sorted by length, the longest first, so that neighbours need about as much padding.
    `num_queries` and `lens` [sequences] are what a sequence adds and its length with that; `block_tables`
    [sequences, blocks] is padded with 0; `slots` [tokens] is where each token's keys and values go:
    block id * block size + offset.
    """

    num_decodes: int
    num_queries: IntArray
    lens: IntArray
    block_tables: IntArray
    slots: IntArray
