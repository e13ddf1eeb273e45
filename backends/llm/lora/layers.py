"""Linear layers that adapters add to, row by row."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..kernels import device_processors, packed_kernels_for
from ..models.linear import Linear
from ..models.linear_tensors import LinearTensors, Part
from ..models.packed_matrix import PackedMatrix, pack_floats
from ..step_context import StepContext
from .adapter import Adapter, LowRank
from .step import StepAdapters, device_slot

if TYPE_CHECKING:
    from .triton_lora import LayerSlots


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """What a slot has of one part of a layer: this rank's share, in the form in which the device multiplies it.

    `down` and `up` are packed on a CPU with kernels; otherwise they are plain. `offset` is what DoRA leaves of the
    bias.
    """

    down: PackedMatrix | torch.Tensor
    up: PackedMatrix | torch.Tensor
    gain: torch.Tensor | None
    offset: torch.Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Packed neighbours of one kind are multiplied by one product."""
        down, up = self.down, self.up
        assert isinstance(down, PackedMatrix), "only what kernels multiply has kinds"
        assert isinstance(up, PackedMatrix), "both are packed, or none is"
        return down.form, down.num_outputs, up.form


class _AdaptedPart:
    """Columns [first, first + num_outputs) of a layer's result, and what each slot has of them."""

    def __init__(self, tensors: LinearTensors, first: int, num_outputs: int, bias: torch.Tensor | None) -> None:
        self.tensors = tensors
        self.part = tensors.parts[0]
        self.first = first
        self.num_outputs = num_outputs
        self._bias = bias
        self._slots: dict[int, _Placed] = {}
        self.has_gains = False
        # Where kernels in Triton read it: the slots of its layer, of which it is a part with this number.
        self.on_device: tuple[LayerSlots, int] | None = None

    @property
    def num_inputs(self) -> int:
        """Of this rank."""
        return int(self.tensors.share(self.part, torch.empty(0, self.part.num_inputs), inputs=1).shape[1])

    def place(self, slot: int, module: LowRank | None, kernels: ModuleType | None) -> None:
        """What a slot has from now on; None: nothing."""
        self._slots.pop(slot, None)
        if module is not None:
            self._slots[slot] = self._placed(slot, module, kernels)
        elif self.on_device is not None:
            self.on_device[0].clear(device_slot(slot), self.on_device[1])
        self.has_gains = any(placed.gain is not None for placed in self._slots.values())

    def _placed(self, slot: int, module: LowRank, kernels: ModuleType | None) -> _Placed:
        tensors, part = self.tensors, self.part
        down, up = tensors.share(part, module.down, inputs=1), tensors.share(part, module.up, outputs=0)
        gain = offset = None
        if module.gain is not None:
            gain = tensors.share(part, module.gain, outputs=0).float().to(tensors.device)
            offset = None if self._bias is None else (1 - gain) * self._bias
        if kernels is not None:
            return _Placed(_packed(down, kernels), _packed(up, kernels), gain, offset)
        if self.on_device is not None:
            slots, number = self.on_device
            return _Placed(*slots.place(device_slot(slot), number, down, up), gain, offset)
        return _Placed(tensors.placed(down), tensors.placed(up), gain, offset)

    def additions(self, slots: tuple[int, ...]) -> Iterator[bytes]:
        """What adapters add, as `add_adapters` of `_packed_linear.c` reads it: one `Addition` for neighbours alike."""
        first = 0
        while first < len(slots):
            placed = self._slots.get(slots[first])
            stop = first + 1
            if placed is None:
                first = stop
                continue
            alike = [placed]
            while stop < len(slots):
                following = self._slots.get(slots[stop])
                if following is None or following.kind != placed.kind:
                    break
                alike.append(following)
                stop += 1
            yield struct.pack("3q", self.first, first, stop - first)
            yield from (_description(each.down) for each in alike)
            yield from (_description(each.up) for each in alike)
            first = stop

    def scale(self, output: torch.Tensor, step: StepAdapters) -> None:
        """Multiply columns of an output by DoRA's gains."""
        for run, slot in enumerate(step.slots):
            placed = self._slots.get(slot)
            if placed is None or placed.gain is None:
                continue
            columns = self._columns(output, step.bounds[run], step.bounds[run + 1])
            columns.mul_(placed.gain)
            if placed.offset is not None:
                columns.add_(placed.offset)

    def add(self, output: torch.Tensor, rows: torch.Tensor, step: StepAdapters) -> None:
        """Add to columns of `output` [rows, columns of the layer], by torch, for `rows` [rows, inputs]."""
        for run, slot in enumerate(step.slots):
            placed = self._slots.get(slot)
            if placed is None:
                continue
            assert isinstance(placed.down, torch.Tensor), "both are packed, or none is"
            assert isinstance(placed.up, torch.Tensor), "both are packed, or none is"
            start, stop = step.bounds[run], step.bounds[run + 1]
            narrow = torch.nn.functional.linear(rows[start:stop], placed.down)
            self._columns(output, start, stop).addmm_(narrow, placed.up.t())

    def _columns(self, output: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return output[start:stop, self.first : self.first + self.num_outputs]


class LoraLinear:
    """A layer and what adapters add to it. Rows without an adapter get what the layer gives them."""

    def __init__(self, linear: Linear, parts: Sequence[_AdaptedPart], kernels: ModuleType | None) -> None:
        self.base = linear
        self._parts = tuple(parts)
        self._kernels = kernels
        self._on_device: LayerSlots | None = None
        self._key: object = None
        self._additions = b""

    def keep_on_device(self, num_slots: int, max_rank: int) -> None:
        """Take the memory of all slots, for kernels in Triton."""
        from .triton_lora import LayerSlots

        tensors, parts = self._parts[0].tensors, self._parts
        self._on_device = LayerSlots(
            [part.num_outputs for part in parts],
            parts[0].num_inputs,
            num_slots=num_slots,
            max_rank=max_rank,
            dtype=tensors.dtype,
            device=tensors.device,
        )
        for number, part in enumerate(parts):
            part.on_device = self._on_device, number

    @property
    def has_gains(self) -> bool:
        """Whether an adapter in a slot is one of DoRA, which scales what the layer gives."""
        return any(part.has_gains for part in self._parts)

    def additions(self, step: StepAdapters) -> bytes:
        """What adapters add in a step, for kernels; it holds the addresses of matrices in the slots."""
        if self._key != step.key:
            self._key = step.key
            self._additions = b"".join(each for part in self._parts for each in part.additions(step.slots))
        return self._additions

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        output = self.base(rows, step)
        if step is not None and step.adapters is not None:
            self._scale(output, step.adapters)
            self._add(output, rows, step.adapters)
        return output

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        if step is None or step.adapters is None:
            return self.base.add_to(residual, rows, step)
        if step.adapters.has_gains and self.has_gains:
            return residual.add_(self(rows, step))
        residual = self.base.add_to(residual, rows, step)
        self._add(residual, rows, step.adapters)
        return residual

    def _scale(self, output: torch.Tensor, step: StepAdapters) -> None:
        for part in self._parts:
            if part.has_gains:
                part.scale(output, step)

    def _add(self, output: torch.Tensor, rows: torch.Tensor, step: StepAdapters) -> None:
        if self._on_device is not None:
            self._on_device.add(output, rows, step.tiles)
        elif self._kernels is None:
            for part in self._parts:
                part.add(output, rows, step)
        elif rows.dtype is torch.float32 and output.is_contiguous():
            self._add_packed(self._kernels, output, rows, step)
        else:
            added = torch.zeros(output.shape, dtype=torch.float32)
            self._add_packed(self._kernels, added, rows.float(), step)
            output.add_(added)

    def _add_packed(self, kernels: ModuleType, output: torch.Tensor, rows: torch.Tensor, step: StepAdapters) -> None:
        additions = self.additions(step)
        if not additions:
            return
        assert output.shape[0] == rows.shape[0], f"an output of {output.shape[0]} rows for {rows.shape[0]}"
        rows = rows.contiguous()
        kernels.add_adapters(
            additions,
            step.bounds_address,
            len(step.bounds),
            rows.data_ptr(),
            *rows.shape,
            output.data_ptr(),
            output.shape[1],
            torch.get_num_threads(),
        )


class AdaptedLayers:
    """All layers of a network that adapters may add to, by the names of their modules.

    `num_slots` adapters of ranks up to `max_rank` run at once, and one more for texts that are embedded.
    """

    def __init__(self, device: torch.device, *, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots + 1
        self.max_rank = max_rank
        self._device = device
        self._kernels = packed_kernels_for(device)
        # On a GPU with Triton all slots have their memory from `allocate` on.
        self.is_on_device = self._kernels is None and device_processors(device) is not None
        self._layers: list[LoraLinear] = []
        self._parts: dict[str, _AdaptedPart] = {}
        self._placed: dict[int, Adapter] = {}
        self._with_gains: set[int] = set()
        self._version = 0

    @property
    def modules(self) -> Mapping[str, Part]:
        return {name: each.part for name, each in self._parts.items()}

    def wrap(self, linear: Linear, tensors: LinearTensors) -> Linear:
        """The layer that a network calls in place of `linear`, which was made of `tensors`."""
        parts, first = [], 0
        bias = tensors.bias()
        for single in tensors.each():
            part = single.parts[0]
            num_outputs = single.share(part, torch.empty(part.num_outputs, 0), outputs=0).shape[0]
            part_bias = None if bias is None else bias[first : first + num_outputs].float()
            parts.append(_AdaptedPart(single, first, num_outputs, part_bias))
            self._parts[part.name] = parts[-1]
            first += num_outputs
        self._layers.append(LoraLinear(linear, parts, self._kernels))
        return self._layers[-1]

    def num_bytes(self) -> int:
        """What adapters of the greatest rank in all slots take of the device at most."""
        parts, values = list(self._parts.values()), 0
        if self.is_on_device:
            from .triton_lora import padded_rank

            values = padded_rank(self.max_rank) * sum(part.num_inputs + part.num_outputs for part in parts)
            return self.num_slots * values * max([int(part.tensors.dtype.itemsize) for part in parts], default=0)
        values = self.max_rank * sum(part.part.num_inputs + part.part.num_outputs for part in parts)
        return self.num_slots * values * 4  # float32

    def allocate(self) -> bool:
        """Take the memory of the slots, where kernels in Triton read them. False: adapters take theirs as they come."""
        if self.is_on_device:
            for layer in self._layers:
                layer.keep_on_device(self.num_slots, self.max_rank)
        return self.is_on_device

    def place(self, slot: int, adapter: Adapter) -> bool:
        """Put an adapter that was checked into a slot. False: it is there already."""
        if self._placed.get(slot) is adapter:
            return False
        with torch.inference_mode():
            for name, part in self._parts.items():
                part.place(slot, adapter.modules.get(name), self._kernels)
        self._placed[slot] = adapter
        self._with_gains.discard(slot)
        if any(module.gain is not None for module in adapter.modules.values()):
            self._with_gains.add(slot)
        self._version += 1
        return True

    def step(self, slots: Sequence[int], bounds: Sequence[int]) -> StepAdapters:
        """The adapters of a step, by its runs."""
        has_gains = not self._with_gains.isdisjoint(slots)
        return StepAdapters(
            slots,
            bounds,
            self._version,
            device=self._device,
            has_gains=has_gains,
            has_tiles=self.is_on_device,
        )


def _packed(matrix: torch.Tensor, kernels: ModuleType) -> PackedMatrix:
    return pack_floats(matrix.contiguous(), kernels)


def _description(matrix: PackedMatrix | torch.Tensor) -> bytes:
    assert isinstance(matrix, PackedMatrix), "only what kernels multiply is described"
    return matrix.description
