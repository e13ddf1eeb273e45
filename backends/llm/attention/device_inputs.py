"""What kernels need of one step, on the device; knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Of the chunks after the decodes; `row_starts` counts from their first token. See `prefill_attention`."""

    num_queries: torch.Tensor
    row_starts: torch.Tensor
    tile_rows: torch.Tensor
    tile_starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """One step on the device. Tensors keep their addresses, so that a captured step can be filled anew."""

    num_decodes: int
    slots: torch.Tensor
    lens: torch.Tensor
    tables: torch.Tensor
    prefill: PrefillTiles | None = None
