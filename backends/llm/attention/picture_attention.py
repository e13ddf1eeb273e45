"""Attention in which each token of a picture sees the whole picture, in the manner of Gemma 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from .paged import AttentionSpec, IntArray, ReadableAttention, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRun:
    """Rows [start, stop) of a step are tokens of a picture, up to its last, which is before position `end`.

    `block_ids` are the sequence's blocks up to there.
    """

    start: int
    stop: int
    end: int
    block_ids: IntArray


@dataclass(frozen=True, slots=True)
class PictureInputs:
    """`masks` are true for what is seen, [rows, keys] of each run, by a layer's window."""

    inner: Any
    runs: Sequence[PictureRun]
    masks: dict[int | None, list[torch.Tensor]]


class PictureAttention:
    """Another implementation attends for all rows. Then the rows of pictures attend once more, to their ends.

    A step has all rows of a run that are not kept yet.
    """

    def __init__(
        self,
        attention: ReadableAttention,
        spec: AttentionSpec,
        *,
        num_kv_heads: int,
        device: torch.device,
    ) -> None:
        """UnsupportedError for a model whose scores are changed before the softmax, or cut in chunks."""
        if spec.softcap is not None or spec.sinks or spec.chunks:
            raise UnsupportedError("tokens of pictures see whole pictures only where attention has no softcap or sinks")
        self._attention = attention
        self._windows = spec.windows
        self._scale = spec.scale
        self._num_heads = spec.num_heads
        self._num_turned = spec.num_heads + num_kv_heads
        self._device = device

    def prepare(self, inner: Any, runs: Sequence[PictureRun]) -> PictureInputs:
        """`inner` is what the other implementation has prepared of the step."""
        masks = {window: [_mask(run, window).to(self._device) for run in runs] for window in set(self._windows)}
        return PictureInputs(inner, runs, masks)

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: PictureInputs
    ) -> torch.Tensor:
        """`heads` [tokens, heads + 2 * kv heads, head_dim] are turned in place -> [tokens, heads * head_dim]."""
        if rotation is not None:
            rotation.apply_rope(heads[:, : self._num_turned])
        output = self._attention.rope_and_attend(layer, heads, None, inputs.inner)
        for run, mask in zip(inputs.runs, inputs.masks[self._windows[layer]], strict=True):
            keys, values = (kept[None, :, : run.end] for kept in self._attention.read(layer, run.block_ids))
            queries = heads[run.start : run.stop, : self._num_heads].transpose(0, 1)[None]
            mixed = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                scale=self._scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
            output[run.start : run.stop] = mixed[0].transpose(0, 1).flatten(1)
        return output


def _mask(run: PictureRun, window: int | None) -> torch.Tensor:
    """Rows see all up to the end of their picture, as far back as the window lets them."""
    rows = torch.arange(run.end - (run.stop - run.start), run.end)
    return torch.arange(run.end) > rows[:, None] - (run.end if window is None else window)
