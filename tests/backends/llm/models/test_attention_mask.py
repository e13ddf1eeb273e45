"""What layers see is read from the functions that transformers makes its masks from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modelserver_backends.llm.models.attention_hook import SeenTokens, read_mask
from transformers import masking_utils as masks

from modelserver.backend import UnsupportedError

CPU = torch.device("cpu")
NO_PADDING = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (masks.causal_mask_function, SeenTokens()),
        (masks.sliding_window_causal_mask_function(1), SeenTokens(window=1)),
        (masks.sliding_window_causal_mask_function(11), SeenTokens(window=11)),
        (masks.sliding_window_causal_mask_function(131_072), SeenTokens(window=131_072)),
        (masks.chunked_causal_mask_function(13, NO_PADDING), SeenTokens(chunk=13)),
        (masks.chunked_causal_mask_function(8192, NO_PADDING), SeenTokens(chunk=8192)),
    ],
)
def test_masks_that_are_known(function: Callable[..., Any], expected: SeenTokens) -> None:
    assert read_mask(mask_function=function, device=CPU, batch_size=1, q_length=8) == expected
    assert expected[:, :, -3:] is expected


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (masks.bidirectional_mask_function, "come later"),
        (masks.sliding_window_bidirectional_mask_function(7), "come later"),
        (masks.and_masks(masks.causal_mask_function, lambda _b, _h, q, kv: (q - kv) % 2 == 0), "other tokens"),
        (masks.and_masks(masks.causal_mask_function, lambda _b, _h, q, kv: (q - kv < 9) | (kv < 4)), "other tokens"),
        (masks.and_masks(masks.causal_mask_function, lambda _b, _h, q, kv: q - kv < 9 + q // 5000), "other tokens"),
    ],
)
def test_masks_that_are_not(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read_mask(mask_function=function, device=CPU)
