"""One vector of many, by sentence-transformers' arithmetic written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from modelserver_backends.llm.embedding.head import pool
from modelserver_backends.llm.embedding.layout import POOLINGS

from modelserver.backend import Array

ARITHMETIC: dict[str, Callable[[Array], Array]] = {
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "max": lambda rows: rows.max(axis=0),
    "mean": lambda rows: rows.sum(axis=0) / len(rows),
    "mean_sqrt_len": lambda rows: rows.sum(axis=0) / np.sqrt(len(rows)),
    "weightedmean": lambda rows: np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1)),
}


@pytest.mark.parametrize("way", POOLINGS)
def test_padding_makes_no_difference(way: str) -> None:
    drawn = np.random.default_rng(3)
    lengths = [5, 1, 9]
    hidden = drawn.normal(size=(3, 9, 4)).astype(np.float32)
    for row, length in enumerate(lengths):
        hidden[row, length:] = np.nan
    found = pool(torch.from_numpy(hidden), torch.tensor(lengths), (way,)).numpy()
    expected = [ARITHMETIC[way](hidden[row, :length]) for row, length in enumerate(lengths)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_several_ways_are_joined() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 8.0]]])
    assert pool(hidden, torch.tensor([2]), ("cls", "mean")).tolist() == [[1.0, 2.0, 2.0, 5.0]]
