"""The functions that transformers calls for attention, and for its masks while a network is tried out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from .attention_mask import SeenTokens, read_mask
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
