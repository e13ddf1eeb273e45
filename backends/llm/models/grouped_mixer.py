"""Modules of transformers that keep states, called for groups of sequences of a step, while all others take its rows at
once.

transformers' own code computes a batch of sequences of one length; a step of ours is one row of tokens of many.
Sequences that add one token are such a batch, and so are chunks of equal lengths. Prompts that begin are padded on
their left, as transformers' own batches are: zeros before the first token leave a state empty.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from .recurrent_states import RecurrentStates, StateGroup
from .state_cache import GroupCache, StepCache

_MASK = "attention_mask"


class GroupedMixer:
    """Stands in for the `forward` of a module that keeps states."""

    def __init__(self, forward: Callable[..., Any], states: RecurrentStates) -> None:
        self._forward = forward
        self._states = states
        names = list(signature(forward).parameters)
        # Where the module takes the mask of padding; None if it knows none.
        self._mask_place = names.index(_MASK) if _MASK in names else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(given, StepCache) for given in (*args, *kwargs.values())):
            return self._forward(*args, **kwargs)
        groups = self._states.groups
        num_rows = groups[-1].stop
        outputs = []
        for group in groups:
            cache = GroupCache(self._states, group)
            own_args = [_cut(given, group, num_rows, cache) for given in args]
            own = {name: _cut(given, group, num_rows, cache) for name, given in kwargs.items()}
            if group.is_padded and self._mask_place is not None:
                mask = torch.zeros(len(group.slots) * group.longest, dtype=torch.long, device=self._states.device)
                mask = mask.index_fill_(0, group.places.to(mask.device), 1).view(len(group.slots), -1)
                if self._mask_place < len(own_args):
                    own_args[self._mask_place] = mask
                else:
                    own[_MASK] = mask
            output = self._forward(*own_args, **own)
            cache.close()
            outputs.append(_flat(output, group))
        return outputs[0] if len(outputs) == 1 else _joined(outputs)


def _cut(given: Any, group: StateGroup, num_rows: int, cache: GroupCache) -> Any:
    """What of an argument is the group's: [1, rows, ...] -> [sequences, tokens, ...]."""
    if isinstance(given, StepCache):
        return cache
    if isinstance(given, tuple):
        return tuple(_cut(each, group, num_rows, cache) for each in given)
    if not isinstance(given, torch.Tensor) or given.shape[:2] != (1, num_rows):
        return given
    rows = given[:, group.start : group.stop]
    if not group.is_stacked:
        return rows
    shape = (len(group.slots), group.longest)
    if not group.is_padded:
        return rows[0].unflatten(0, shape)
    padded = rows.new_zeros(shape[0] * shape[1], *rows.shape[2:])
    return padded.index_copy_(0, group.places.to(rows.device), rows[0]).unflatten(0, shape)


def _flat(output: Any, group: StateGroup) -> Any:
    """The same backwards."""
    if isinstance(output, tuple):
        return tuple(_flat(each, group) for each in output)
    if not group.is_stacked or not isinstance(output, torch.Tensor):
        return output
    rows = output.flatten(0, 1)
    return (rows[group.places.to(rows.device)] if group.is_padded else rows)[None]


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(each)) for each in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=1) if isinstance(first, torch.Tensor) else first
