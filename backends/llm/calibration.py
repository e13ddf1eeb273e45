"""What a calibration text says about the inputs of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, Self

import torch

from .checkpoint import Checkpoint
from .layerwise import LayerwiseNetwork
from .models.linear import GroupedLinear, Linear, ListedLinears
from .models.linear_tensors import LinearTensors, Split
from .quantization.scheme import FloatScheme
from .step_context import StepContext

# Rows of a sample: products with them take a tenth of the time of those with all rows.
_SAMPLE_ROWS = 512


class Measured(Protocol):
    """What is kept of the inputs of a layer."""

    def add(self, rows: torch.Tensor, /) -> None:
        """`rows` [rows, inputs] in float32."""
        ...

    def found(self) -> torch.Tensor | None:
        """None if the layer has seen no rows, as an expert that the text never asked."""
        ...


class MeanSquares:
    """float32 [inputs]: the mean square of each input."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._count = 0

    def add(self, rows: torch.Tensor, /) -> None:
        found = self.measure(rows)
        self._total = found if self._total is None else self._total.add_(found)
        self._count += rows.shape[0]

    def found(self) -> torch.Tensor | None:
        return None if self._total is None else self._total / self._count

    def measure(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.square().sum(dim=0)


class MeanProducts(MeanSquares):
    """float32 [inputs, inputs]: the mean product of each input with each."""

    def measure(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.T @ rows


class SampledRows:
    """float32 [rows, inputs]: up to 512 of the rows, spread over the text."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, /) -> None:
        self._rows.append(rows[:: max(1, 8 * rows.shape[0] // _SAMPLE_ROWS)].clone())

    def found(self) -> torch.Tensor | None:
        if not self._rows:
            return None
        rows = torch.cat(self._rows)
        return rows[:: -(-rows.shape[0] // _SAMPLE_ROWS)]


def measured_importance(checkpoint: Checkpoint, text: str) -> dict[str, torch.Tensor]:
    """The mean squares of the inputs of each linear layer of a decoder in floats, by module.

    Raises as `LayerwiseNetwork` does.
    """
    network = LayerwiseNetwork(checkpoint, text)
    found: dict[str, torch.Tensor] = {}
    for index in range(network.config.num_layers):
        found |= measured(network, index, MeanSquares)
        network.advance(index)
    return found


def measured(
    network: LayerwiseNetwork,
    index: int,
    kind: Callable[[], Measured],
    modules: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """What `kind` finds of the inputs of a layer's `modules`, or of all of its linear layers."""
    scheme = _Measuring(kind, modules)
    network.observe(index, scheme)
    found = {kept: kept.found() for kept in set(scheme.measured.values())}
    return {name: value for name, kept in scheme.measured.items() if (value := found[kept]) is not None}


class _MeasuredLinear:
    """Multiplies as another layer does, and shows its rows."""

    def __init__(self, linear: Linear, kept: Measured) -> None:
        self._linear, self._kept = linear, kept

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        self._kept.add(rows.float())
        return self._linear(rows, step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        self._kept.add(rows.float())
        return self._linear.add_to(residual, rows, step)


class _Measuring(FloatScheme):
    """Measures the layers of `modules`, or all of them; parts that lie side by side have the same rows."""

    def __init__(self, kind: Callable[[], Measured], modules: Collection[str] | None) -> None:
        self.measured: dict[str, Measured] = {}
        self._kind, self._modules = kind, modules

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:  # noqa: ARG003 - it is made for a text
        raise AssertionError("no checkpoint asks for it")

    def make_linear(self, tensors: LinearTensors) -> Linear:
        """Routers are not measured."""
        linear = super().make_linear(tensors)
        wanted = [part.name for part in tensors.parts if self._modules is None or part.name in self._modules]
        if tensors.split is Split.WHOLE or not wanted:
            return linear
        kept = self._kind()
        self.measured |= dict.fromkeys(wanted, kept)
        return _MeasuredLinear(linear, kept)

    def make_grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        return ListedLinears([self.make_linear(tensors) for tensors in experts])
