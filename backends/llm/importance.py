"""What a calibration text says about the inputs of linear layers: the mean square of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """float32 [inputs] of each linear layer of a decoder in floats, by module, while it reads at most 4096 tokens.

    Raises as the checkpoint does, and InvalidArgumentError for a text of fewer than two tokens.
    """
    windows = windows_of(checkpoint, text)
    scheme = _Measuring.from_config(None)
    longest = max(map(len, windows))
    options = EngineOptions(device="cpu", max_model_len=longest + 1, enable_prefix_caching=False)
    runner = load_runner(checkpoint, options, Sampler(), scheme)
    engine = Engine(options=options, runner=runner, tokenizer=None)
    try:
        for window in windows:
            engine.add(GenerationRequest(window, SamplingParams(max_tokens=1, temperature=0.0)))
        while engine.has_work:
            engine.step()
    finally:
        runner.close()
    return {name: sums.squares / sums.count for name, sums in scheme.measured.items() if sums.count}


class _Sums:
    def __init__(self, num_inputs: int) -> None:
        self.squares = torch.zeros(num_inputs)
        self.count = 0


class _MeasuredLinear:
    """Multiplies as another layer does, and adds up the squares of its rows."""

    def __init__(self, linear: Linear, sums: _Sums) -> None:
        self._linear, self._sums = linear, sums

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        self._measure(rows)
        return self._linear(rows, step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        self._measure(rows)
        return self._linear.add_to(residual, rows, step)

    def _measure(self, rows: torch.Tensor) -> None:
        self._sums.squares += rows.float().square().sum(dim=0)
        self._sums.count += rows.shape[0]


class _Measuring(FloatScheme):
    def __init__(self) -> None:
        self.measured: dict[str, _Sums] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        FloatScheme.from_config(config)
        return cls()

    def make_linear(self, tensors: LinearTensors) -> Linear:
        """Parts that lie side by side have the same rows. Head and routers are not measured."""
        if tensors.split is Split.WHOLE:
            return super().make_linear(tensors)
        sums = _Sums(tensors.parts[0].num_inputs)
        self.measured |= {part.name: sums for part in tensors.parts}
        return _MeasuredLinear(super().make_linear(tensors), sums)

    def make_grouped(self, experts: Sequence[LinearTensors]) -> GroupedLinear:
        return ListedLinears([self.make_linear(tensors) for tensors in experts])
