"""What adapters add, in torch's operations that depend on no value: a graph can hold them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from modelserver_backends.llm.lora.step import RowTiles


class TorchLayerSlots:
    """As `triton_lora.LayerSlots`."""

    def __init__(
        self,
        widths: Sequence[int],
        num_inputs: int,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._firsts = [sum(widths[:part]) for part in range(len(widths))]
        self._widths = tuple(widths)
        self._downs = torch.zeros(num_slots, len(widths), max_rank, num_inputs, dtype=dtype, device=device)
        self._ups = torch.zeros(num_slots, sum(widths), max_rank, dtype=dtype, device=device)

    def place(self, slot: int, part: int, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.clear(slot, part)
        own_down = self._downs[slot, part, : len(down)]
        own_up = self._ups[slot, self._firsts[part] : self._firsts[part] + self._widths[part], : len(down)]
        return own_down.copy_(down), own_up.copy_(up)

    def clear(self, slot: int, part: int) -> None:
        self._downs[slot, part].zero_()

    def add(self, output: torch.Tensor, rows: torch.Tensor, tiles: RowTiles) -> None:
        slots, firsts, ends = tiles.table.unbind(1)
        places = torch.arange(len(rows))[:, None]
        is_own = (places >= firsts) & (places < ends) & (slots >= 0)
        assert tiles.num_rows in (16, 64)
        for slot in range(len(self._downs)):
            is_slot = (is_own & (slots == slot)).any(dim=1, keepdim=True)
            for part, (first, width) in enumerate(zip(self._firsts, self._widths, strict=True)):
                up = self._ups[slot, first : first + width]
                output[:, first : first + width] += is_slot * (rows @ self._downs[slot, part].t() @ up.t())


def use_torch_adapters(change: Callable[[object, str, object], object] = setattr) -> None:
    """Let adapters of this process lie on its device, as with Triton on a GPU."""
    from modelserver_backends.llm.lora import layers

    name = "modelserver_backends.llm.lora.triton_lora"
    module = ModuleType(name)
    vars(module).update(LayerSlots=TorchLayerSlots, padded_rank=lambda rank: rank)
    sys.modules[name] = module
    change(layers, "device_processors", lambda _device: 4)
