"""What the numbers of a checkpoint's config.json must be, for a network to be made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from modelserver.backend import InvalidArgumentError

if TYPE_CHECKING:
    from .config import DecoderConfig

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def check_config(config: DecoderConfig, path: Path) -> None:
    """Raises InvalidArgumentError, naming the file, for numbers that no network has."""
    mistake = next(_mistakes(config), None)
    if mistake is not None:
        raise InvalidArgumentError(f"{path} of a {config.model_type} says {mistake}")


def _mistakes(config: DecoderConfig) -> Iterator[str]:
    for name in _SIZES:
        if getattr(config, name) < 1:
            yield f"{name} {getattr(config, name)}: expected 1 or more"
    if config.num_heads % config.num_kv_heads:
        yield f"num_kv_heads {config.num_kv_heads}: expected a divisor of num_heads ({config.num_heads})"
    for name in ("windows", "ropes"):
        if len(getattr(config, name)) != config.num_layers:
            yield f"{name} of {len(getattr(config, name))} layers: expected {config.num_layers}, as num_layers"
    for window in config.windows:
        if window is not None and (type(window) is not int or window < 1):
            yield f"sliding_window {window!r}: expected an integer, 1 or more"
    for name in ("attention_softcap", "logit_softcap"):
        softcap = getattr(config, name)
        if softcap is not None and not (isinstance(softcap, int | float) and softcap > 0):
            yield f"{name} {softcap!r}: expected a number greater than 0"
    if isinstance(config.attention_scale, complex):
        yield "query_pre_attn_scalar less than 0: expected more"
    moe = config.moe
    if moe is not None and not 1 <= moe.num_experts_per_tok <= moe.num_experts:
        yield f"num_experts_per_tok {moe.num_experts_per_tok}: expected 1 to num_experts ({moe.num_experts})"
