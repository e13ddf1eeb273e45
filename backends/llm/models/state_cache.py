"""A cache as the layers of transformers see it: keys and values pass through to blocks, states are rows of slots.

`StateProbe` finds the modules that keep states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from .recurrent_states import RecurrentStates, StateGroup, StateKey, StateShape


class StepCache:
    """What a whole network is given for a step. Layers that keep states are given a `GroupCache` in its place.

    `layer` is the one that attends next: modules that several layers share do not know it. `num_before` is what a layer
    hears that asks how many tokens were before these: where it adds that to their numbers in the step, [tokens].
    """

    def __init__(self) -> None:
        self.layer = 0
        self.num_before: torch.Tensor | int = 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.layer = layer_idx
        return keys, values

    def get_seq_length(self, layer_idx: int | None = None) -> torch.Tensor | int:
        return 0 if layer_idx is None else self.num_before

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - positions are given, masks are not made
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return query_length, 0


class GroupCache:
    """The states of the sequences of one group, for one call of one layer; `close` keeps what was made of them."""

    def __init__(self, states: RecurrentStates, group: StateGroup) -> None:
        self._states = states
        self._group = group
        self._kept: set[StateKey] = set()
        self._moved: set[StateKey] = set()
        self._gathered: dict[StateKey, torch.Tensor] = {}
        self._slots: torch.Tensor | None = None

    def close(self) -> None:
        for key, rows in self._gathered.items():
            self._states.tensor(key).index_copy_(0, self._slot_ids(rows.device), rows)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._known(StateKey("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._known(StateKey("recurrent", layer_idx, state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        return not self._group.is_fresh

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002 - what is before drafts lies in other slots
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keep the last of the inputs [rows, ..., tokens]; those from before and these, for the convolution."""
        key = StateKey("conv", layer_idx, state_idx)
        past, state = self._known(key), self._rows(key)
        width = state.shape[-1]
        if past is None:
            inputs = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            inputs = torch.cat((past, conv_states), dim=-1)
        state.copy_(inputs[..., -width:])
        self._kept.add(key)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        key = StateKey("recurrent", layer_idx, state_idx)
        self._kept.add(key)
        return self._rows(key).copy_(recurrent_states)

    def _known(self, key: StateKey) -> torch.Tensor | None:
        """None of what a sequence that begins has not kept yet."""
        return None if self._group.is_fresh and key not in self._kept else self._rows(key)

    def _rows(self, key: StateKey) -> torch.Tensor:
        """[sequences, ...]: of one sequence the memory where it is kept, of several a copy that `close` writes back."""
        tensor = self._states.tensor(key)
        if not self._group.is_stacked:
            slot, kept = self._group.slots[0], self._group.kept
            if kept is None:
                return tensor[slot : slot + 1]
            if key not in self._moved:
                self._moved.add(key)
                tensor[kept] = tensor[slot]
            return tensor[kept : kept + 1]
        rows = self._gathered.get(key)
        if rows is None:
            rows = self._gathered[key] = tensor.index_select(0, self._slot_ids(tensor.device))
        return rows

    def _slot_ids(self, device: torch.device) -> torch.Tensor:
        if self._slots is None:
            self._slots = torch.tensor(self._group.slots, device=device)
        return self._slots


# Which modules of a network of transformers keep states of sequences, and how large these are: found by computing a
# few tokens with transformers' own cache.

_QUESTIONS = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")


class StateProbe:
    """`cache` is for one call of the network within `with`; then `mixers` are the modules that asked it for states."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.cache = cache
        self.mixers: list[Any] = []
        self._model = model
        self._running: list[Any] = []
        self._hooks: list[Any] = []
        for name in _QUESTIONS:
            setattr(cache, name, self._noting(getattr(cache, name)))

    def __enter__(self) -> StateProbe:
        for module in self._model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                self._hooks.append(module.register_forward_pre_hook(lambda module, _: self._running.append(module)))
                self._hooks.append(module.register_forward_hook(self._ended))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def shapes(self) -> dict[StateKey, StateShape]:
        """Of one sequence's states. UnsupportedError, if something keeps them that cannot be called by sequence."""
        found = {}
        for layer, kept in enumerate(self.cache.layers):
            for kind in ("conv", "recurrent"):
                for place, state in getattr(kept, f"{kind}_states", {}).items():
                    if state is not None:
                        found[StateKey(kind, layer, place)] = StateShape(tuple(state.shape[1:]), state.dtype)
        if not found or not self.mixers:
            raise unknown_states(self._model)
        return found

    def _noting(self, method: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                raise unknown_states(self._model)
            if self._running[-1] not in self.mixers:
                self.mixers.append(self._running[-1])
            return method(*args, **kwargs)

        return noted

    def _ended(self, *_: Any) -> None:
        self._running.pop()


def unknown_states(model: Any) -> UnsupportedError:
    return UnsupportedError(f"{type(model).__name__} keeps states of sequences in a way that is not known here")


def stateful_cache(model: Any) -> Any | None:
    """transformers' cache for a network some of whose layers keep states; None for all others."""
    try:
        from transformers import DynamicCache
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        cache = DynamicCache(config=model.config)
    except (ImportError, AttributeError, TypeError, LookupError, ValueError):
        return None
    return cache if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers) else None
