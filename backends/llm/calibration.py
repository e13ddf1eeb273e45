"""What a calibration text says about the inputs of linear layers: the mean square of each, or how they go together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch

from .checkpoint import Checkpoint
from .engine import Engine
from .generation import GenerationRequest
from .models.linear import GroupedLinear, Linear, ListedLinears
from .models.linear_tensors import LinearTensors, Split
from .options import EngineOptions
from .quantization.scheme import FloatScheme
from .quantization_quality import windows_of
from .runner import load_runner
from .sampler import Sampler
from .sampling_params import SamplingParams
from .step_context import StepContext


def measured_importance(checkpoint: Checkpoint, text: str) -> dict[str, torch.Tensor]:
    """float32 [inputs] of each linear layer of a decoder in floats, by module: the mean squares.

    It reads at most 4096 tokens. Raises as the checkpoint does, and InvalidArgumentError for a text of fewer than two.
    """
    return _measured(checkpoint, text, _squares, None)


def measured_products(checkpoint: Checkpoint, text: str, modules: Collection[str]) -> dict[str, torch.Tensor]:
    """The same of some modules: float32 [inputs, inputs], the mean products of each input with each."""
    return _measured(checkpoint, text, _products, modules)


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(dim=0)


def _products(rows: torch.Tensor) -> torch.Tensor:
    return rows.T @ rows


Measure = Callable[[torch.Tensor], torch.Tensor]


def _measured(
    checkpoint: Checkpoint, text: str, measure: Measure, modules: Collection[str] | None
) -> dict[str, torch.Tensor]:
    windows = windows_of(checkpoint, text)
    scheme = _Measuring(measure, modules)
    options = EngineOptions(device="cpu", max_model_len=max(map(len, windows)) + 1, enable_prefix_caching=False)
    runner = load_runner(checkpoint, options, Sampler(), scheme)
    engine = Engine(options=options, runner=runner, tokenizer=None)
    try:
        for window in windows:
            engine.add(GenerationRequest(window, SamplingParams(max_tokens=1, temperature=0.0)))
        while engine.has_work:
            engine.step()
    finally:
        runner.close()
    for sums in set(scheme.measured.values()):
        if sums.total is not None:
            sums.total = sums.total / sums.count
    return {name: sums.total for name, sums in scheme.measured.items() if sums.total is not None}


class _Sums:
    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.count = 0


class _MeasuredLinear:
    """Multiplies as another layer does, and adds up what is measured of its rows."""

    def __init__(self, linear: Linear, measure: Measure, sums: _Sums) -> None:
        self._linear, self._measure, self._sums = linear, measure, sums

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        self._add(rows)
        return self._linear(rows, step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        self._add(rows)
        return self._linear.add_to(residual, rows, step)

    def _add(self, rows: torch.Tensor) -> None:
        found = self._measure(rows.float())
        self._sums.total = found if self._sums.total is None else self._sums.total.add_(found)
        self._sums.count += rows.shape[0]


class _Measuring(FloatScheme):
    """Measures the layers of `modules`, or all of them; parts that lie side by side have the same rows."""

    def __init__(self, measure: Measure, modules: Collection[str] | None) -> None:
        self.measured: dict[str, _Sums] = {}
        self._measure, self._modules = measure, modules

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:  # noqa: ARG003 - it is made for a text
        raise AssertionError("no checkpoint asks for it")

    def make_linear(self, tensors: LinearTensors) -> Linear:
        """Head and routers are not measured."""
        linear = super().make_linear(tensors)
        wanted = [part.name for part in tensors.parts if self._modules is None or part.name in self._modules]
        if tensors.split is Split.WHOLE or not wanted:
            return linear
        sums = _Sums()
        self.measured |= dict.fromkeys(wanted, sums)
        return _MeasuredLinear(linear, self._measure, sums)

    def make_grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        return ListedLinears([self.make_linear(tensors) for tensors in experts])
