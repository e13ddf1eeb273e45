"""Mixtures of experts: each token goes through the few that its router likes best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..step_context import StepContext
from .linear import GroupedLinear, Linear
from .mlp import Activation, Mlp


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """One that every token goes through, as much as `gate`, a layer of one output, lets it."""

    mlp: Mlp
    gate: Linear

    def __call__(self, rows: torch.Tensor, step: StepContext) -> torch.Tensor:
        return self.mlp(rows, step).mul_(self.gate(rows, step).sigmoid_())


class Experts:
    """Feed-forward layers, one for each expert."""

    def __init__(self, up: GroupedLinear, down: GroupedLinear, *, num_experts: int, activation: Activation) -> None:
        self._up = up
        self._down = down
        self._num_experts = num_experts
        self._activation = activation

    def mix(
        self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, step: StepContext | None
    ) -> torch.Tensor:
        """The sum of each row's experts `chosen` [rows, n], as much as its `weights` [rows, n] say.

        Rows are sorted by expert, so that each expert multiplies all of its rows at once.
        """
        num_chosen = chosen.shape[1]
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        # Unlike bincount, this does not wait for a GPU.
        counts = flat.new_zeros(self._num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        outputs = self._down(self._activation(self._up(rows[order // num_chosen], counts, step)), counts, step)
        outputs *= weights.reshape(-1)[order, None]
        mixed = torch.empty_like(outputs)
        mixed[order] = outputs
        return mixed.view(rows.shape[0], num_chosen, -1).sum(dim=1)


class Moe:
    """`router` scores all experts. `is_normalised`: the weights of a token's experts are made to sum to one.

    `sum_ranks`: with experts split over ranks, adds up what each has.
    """

    def __init__(
        self,
        router: Linear,
        experts: Experts,
        *,
        num_experts_per_tok: int,
        is_normalised: bool,
        shared: SharedExpert | None,
        sum_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_chosen = num_experts_per_tok
        self._is_normalised = is_normalised
        self._shared = shared
        self._sum_ranks = sum_ranks

    def __call__(self, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        scores = self._router(rows, step).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self._num_chosen)
        if self._is_normalised:
            weights /= weights.sum(dim=-1, keepdim=True)
        mixed = self._experts.mix(rows, weights.to(rows.dtype), chosen, step)
        if self._shared is not None:
            mixed += self._shared(rows, step)
        return mixed if self._sum_ranks is None else self._sum_ranks(mixed)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return residual.add_(self(rows, step))
