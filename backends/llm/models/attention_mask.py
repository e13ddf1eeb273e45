"""Which tokens the layers of a transformers network see, by the functions from which its attention masks are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from modelserver.backend import UnsupportedError

# Positions at which a mask is asked for all tokens, and one before which every window ends.
_NEAR = (0, 1, 2, 7, 100, 1023, 4096)
_FAR = 1 << 24


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Stands in for a mask: each token sees itself and those before it, the last `window` of them all if that is given,
    or those from the last multiple of `chunk` on.
    """

    window: int | None = None
    chunk: int | None = None

    def __getitem__(self, cut: object) -> SeenTokens:
        """Of some of its rows: what these see is the same."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError("its attention makes other masks out of those that it is given")


def read_mask(*, mask_function: Callable[..., Any], device: torch.device, **_: Any) -> SeenTokens:
    """transformers' mask interface: no mask is made. UnsupportedError for one that is none of the above."""
    mask = _Mask(mask_function, device)
    if mask.sees_later():
        raise UnsupportedError("it looks at tokens that come later, as encoders do: this backend runs causal models")
    first = mask.first_seen(_FAR)
    window = _FAR - first + 1 if first else None
    if mask.begins_at(lambda position: max(0, position + 1 - window) if window else 0):
        return SeenTokens(window=window)
    chunk = first - mask.first_seen(first - 1) if first else 0
    if chunk and mask.begins_at(lambda position: position - position % chunk):
        return SeenTokens(chunk=chunk)
    raise UnsupportedError("its layers see other tokens than all, the last ones or those of a chunk")


@dataclass(frozen=True, slots=True)
class _Mask:
    """`function` of row, head, position and token says whether that is seen from there."""

    function: Callable[..., Any]
    device: torch.device

    def sees_later(self) -> bool:
        return bool(self._sees(5, torch.tensor(6, device=self.device)))

    def begins_at(self, first: Callable[[int], int]) -> bool:
        """Whether tokens see what is from `first` of their position up to themselves."""
        return all(self._sees_from(position, first(position)) for position in _NEAR) and all(
            self.first_seen(position) == first(position) for position in (50_000, _FAR * 2 // 3, _FAR - 1)
        )

    def first_seen(self, position: int) -> int:
        """By halving, of tokens that are seen without gaps."""
        low, high = 0, position
        while low < high:
            middle = (low + high) // 2
            if bool(self._sees(position, torch.tensor(middle, device=self.device))):
                high = middle
            else:
                low = middle + 1
        return low

    def _sees_from(self, position: int, first: int) -> bool:
        tokens = torch.arange(position + 2, device=self.device)
        expected = (tokens >= first) & (tokens <= position)
        return bool((self._sees(position, tokens) == expected).all())

    def _sees(self, position: int, tokens: torch.Tensor) -> torch.Tensor:
        first = torch.zeros((), dtype=torch.long, device=self.device)
        return torch.as_tensor(self.function(first, first, torch.tensor(position, device=self.device), tokens))
