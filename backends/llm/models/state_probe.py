"""Which modules of a network of transformers keep states of sequences, and how large these are: found by computing a
few tokens with transformers' own cache.
"""

from __future__ import annotations

from typing import Any

from modelserver.backend import UnsupportedError

from .recurrent_states import StateKey, StateShape

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
