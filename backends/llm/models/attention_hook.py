"""The functions that transformers calls for attention, and for its masks while a network is tried out;
and how the heads of each layer fit the blocks that all layers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from .attention_trial import AttentionCall

# Names of attention in transformers: in service no masks are made; in a trial they say what each layer sees.
SERVING, TRIAL = "modelserver_paged", "modelserver_trial"
# Arguments of an attention function that do not change its result here, or that `AttentionCall` keeps.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)


def register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (SERVING, TRIAL):
        ALL_ATTENTION_FUNCTIONS.register(name, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(TRIAL, read_mask)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | SeenTokens | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - none at inference
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [1, heads, tokens, head_dim] each -> [1, tokens, heads, head_dim]."""
    if getattr(module, "is_causal", None) is False:
        raise UnsupportedError(
            f"{type(module).__name__} looks at tokens that come later, as encoders do: this backend runs causal models"
        )
    if changing := [name for name, given in others.items() if given is not None and name not in _HARMLESS]:
        raise UnsupportedError(
            f"{type(module).__name__} attends in a way that blocks do not support: {', '.join(changing)}"
        )
    _, num_heads, _, key_dim = query.shape
    value_dim = value.shape[-1]
    head_dim = max(key_dim, value_dim)
    scale = key_dim**-0.5 if scaling is None else scaling
    chunk = None
    if isinstance(attention_mask, SeenTokens):  # the model's own attention goes by that alone
        sliding_window, chunk = attention_mask.window, attention_mask.chunk
    call = AttentionCall(num_heads, key.shape[1], head_dim, scale, softcap, sliding_window, s_aux, chunk)
    queries = _widened(query, head_dim)[0].transpose(0, 1)
    kv = torch.stack((_widened(key, head_dim)[0], _widened(value, head_dim)[0])).permute(2, 0, 1, 3)
    output = module.paged_network.attend(module.layer_idx, queries, kv, call)
    return output.view(1, -1, num_heads, head_dim)[..., :value_dim], None


def _widened(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """With zeros up to `head_dim`: a block's keys and values are of one size, those of latent attention are not."""
    return F.pad(heads, (0, head_dim - heads.shape[-1])) if heads.shape[-1] < head_dim else heads


# Which tokens the layers of a transformers network see, by the functions from which its attention masks are made.

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


@dataclass(frozen=True, slots=True)
class HeadFit:
    """One layer's heads within those that all layers have: its KV heads are copied `copies` times and its query heads
    shared among the copies; what is wider than its own is zero and gives nothing. Exact, at the cost of memory.

    `wide_group` query heads read a copy, of `wide_dim` each; queries times `factor` make one scale right for all.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    copies: int
    wide_group: int
    wide_dim: int
    factor: float

    def queries(self, queries: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [tokens, wide heads, wide_dim]."""
        heads = queries.unflatten(1, (self.num_kv_heads, self.group))
        if self.factor != 1.0:
            heads = heads * self.factor
        return F.pad(heads, (0, self.wide_dim - self.head_dim, 0, self._num_added)).flatten(1, 2)

    def kv(self, kv: torch.Tensor) -> torch.Tensor:
        """[tokens, 2, kv heads, head_dim] -> [tokens, 2, wide kv heads, wide_dim]."""
        return F.pad(kv, (0, self.wide_dim - self.head_dim)).repeat_interleave(self.copies, dim=2)

    def sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        return F.pad(sinks.view(self.num_kv_heads, self.group), (0, self._num_added)).flatten()

    def narrowed(self, output: torch.Tensor) -> torch.Tensor:
        """Back: [tokens, wide heads * wide_dim] -> [tokens, heads * head_dim]."""
        heads = output.view(-1, self.num_kv_heads, self.copies * self.wide_group, self.wide_dim)
        return heads[:, :, : self.group, : self.head_dim].flatten(1)

    @property
    def _num_added(self) -> int:
        return self.copies * self.wide_group - self.group


def fit_heads(calls: Sequence[AttentionCall]) -> tuple[AttentionCall, list[HeadFit | None]]:
    """What all layers are called with, but for window, chunk and sinks, and each one's fit; None where it is as all.

    Where no layer attends, heads as small as can be.
    """
    if not calls:
        return AttentionCall(1, 1, 1, 1.0, None, None), []
    num_kv_heads = math.lcm(*(call.num_kv_heads for call in calls))
    group = max(-(-call.num_heads // num_kv_heads) for call in calls)
    common = replace(
        calls[0],
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=max(call.head_dim for call in calls),
    )
    return common, [None if _shape(call) == _shape(common) else _fit(call, common) for call in calls]


def _shape(call: AttentionCall) -> tuple[int, int, int, float]:
    return call.num_heads, call.num_kv_heads, call.head_dim, call.scale


def _fit(call: AttentionCall, common: AttentionCall) -> HeadFit:
    return HeadFit(
        num_kv_heads=call.num_kv_heads,
        group=call.num_heads // call.num_kv_heads,
        head_dim=call.head_dim,
        copies=common.num_kv_heads // call.num_kv_heads,
        wide_group=common.num_heads // common.num_kv_heads,
        wide_dim=common.head_dim,
        factor=call.scale / common.scale,
    )
