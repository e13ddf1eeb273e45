"""Mixtures of experts: each token goes through the few that its router likes best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..step_context import StepContext
from .decoder_config import MoeConfig
from .linear import GroupedLinear, Linear
from .mlp import Activation, Mlp

# Of weights that are all zero, as sigmoids may be: nothing is divided by zero.
_LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """One that every token goes through, as much as `gate`, a layer of one output, lets it; None: whole."""

    mlp: Mlp
    gate: Linear | None

    def __call__(self, rows: torch.Tensor, step: StepContext) -> torch.Tensor:
        mixed = self.mlp(rows, step)
        return mixed if self.gate is None else mixed.mul_(self.gate(rows, step).sigmoid_())


class Router:
    """Chooses each token's experts by the scores that a layer gives, in float32.

    `correction` [experts] in float32 is added to scores where experts are chosen, not in their weights.
    """

    def __init__(self, linear: Linear, config: MoeConfig, *, correction: torch.Tensor | None = None) -> None:
        self._linear = linear
        self._config = config
        self._correction = correction

    def __call__(self, rows: torch.Tensor, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of the chosen experts, float32 [rows, n], and which they are."""
        config, logits = self._config, self._linear(rows, step).float()
        scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(dim=-1)
        ranked = scores if self._correction is None else scores + self._correction
        if config.num_groups > 1:
            ranked = self._in_best_groups(ranked)
        chosen = ranked.topk(config.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        if config.is_normalised:
            weights /= weights.sum(dim=-1, keepdim=True) + _LEAST_SUM
        return weights if config.weight_scale == 1.0 else weights.mul_(config.weight_scale), chosen

    def _in_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """Experts of other groups come last."""
        config = self._config
        grouped = ranked.unflatten(1, (config.num_groups, -1))
        votes = grouped.topk(config.group_votes).values.sum(dim=-1)
        best = votes.topk(config.num_chosen_groups).indices
        is_left_out = torch.ones_like(votes, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)


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
    """`sum_ranks`: with experts split over ranks, adds up what each has."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        shared: SharedExpert | None,
        sum_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared
        self._sum_ranks = sum_ranks

    def __call__(self, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        weights, chosen = self._router(rows, step)
        mixed = self._experts.mix(rows, weights.to(rows.dtype), chosen, step)
        if self._shared is not None:
            mixed += self._shared(rows, step)
        return mixed if self._sum_ranks is None else self._sum_ranks(mixed)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return residual.add_(self(rows, step))
