"""Modules of transformers that keep states, called for each sequence of a step, while all others take its rows at once.

transformers' own code computes a batch of sequences of one length; a step of ours is one row of tokens of many.
Sequences that add one token are such a batch; a chunk of more goes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .recurrent_states import RecurrentStates, StateGroup
from .state_cache import GroupCache, StepCache


class GroupedMixer:
    """Stands in for the `forward` of a module that keeps states."""

    def __init__(self, forward: Callable[..., Any], states: RecurrentStates) -> None:
        self._forward = forward
        self._states = states

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(given, StepCache) for given in (*args, *kwargs.values())):
            return self._forward(*args, **kwargs)
        groups = self._states.groups
        num_rows = groups[-1].stop
        outputs = []
        for group in groups:
            cache = GroupCache(self._states, group)
            output = self._forward(
                *(_cut(given, group, num_rows, cache) for given in args),
                **{name: _cut(given, group, num_rows, cache) for name, given in kwargs.items()},
            )
            cache.close()
            outputs.append(_flat(output, group))
        return outputs[0] if len(outputs) == 1 else _joined(outputs)


def _cut(given: Any, group: StateGroup, num_rows: int, cache: GroupCache) -> Any:
    """What of an argument is the group's: [1, rows, ...] -> [1, tokens, ...], or [sequences, 1, ...] of a stack."""
    if isinstance(given, StepCache):
        return cache
    if isinstance(given, tuple):
        return tuple(_cut(each, group, num_rows, cache) for each in given)
    if not isinstance(given, torch.Tensor) or given.shape[:2] != (1, num_rows):
        return given
    rows = given[:, group.start : group.stop]
    return rows.transpose(0, 1) if group.is_stacked else rows


def _flat(output: Any, group: StateGroup) -> Any:
    """The same backwards."""
    if isinstance(output, tuple):
        return tuple(_flat(each, group) for each in output)
    return output.transpose(0, 1) if group.is_stacked and isinstance(output, torch.Tensor) else output


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(each)) for each in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=1) if isinstance(first, torch.Tensor) else first
