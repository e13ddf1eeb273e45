"""Scales between layers that make 4 bits lose less (AWQ): inputs that are large get larger weights, and finer codes.

A factor for each input goes into the weights of the layers that read it, and out of what makes it: the norm before
them, or the rows of the matrix before them. In floats the network stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from modelserver.backend import UnsupportedError

from .calibration import SampledRows, measured
from .layerwise import ChangedCheckpoint, LayerwiseNetwork
from .quantization.rounded import GROUP, round_integers

# Powers of the mean size of inputs that are tried.
_POWERS = [step / 20 for step in range(20)]
_LEAST = 1e-4
# How far a layer in floats may be from what it was, as a part of its size.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Link:
    """`readers` get what `maker` makes: a norm (`is_norm`), or the last outputs of a matrix."""

    maker: str
    readers: tuple[str, ...]
    is_norm: bool = False


def scale_layer(
    network: LayerwiseNetwork, checkpoint: ChangedCheckpoint, index: int, rounded: Collection[str]
) -> set[str]:
    """Change the tensors of a layer in `checkpoint`, and return the names of those changed.

    `rounded` are the modules that will be in 4 bits; what is read by others is left as it is. UnsupportedError if the
    family puts its layer together in another way, so that it would compute something else.
    """
    expected = network.results(index)
    samples = measured(network, index, SampledRows)
    for link in _links(network, checkpoint, index):
        makers = set() if link.is_norm else {link.maker}
        if not {*link.readers, *makers} <= set(rounded) or link.readers[0] not in samples:
            continue
        weights = {name: checkpoint.tensor(f"{name}.weight") for name in link.readers}
        scales = _scales(samples[link.readers[0]], list(weights.values()))
        scales = _apply_to_maker(network, checkpoint, link, scales)
        for name, weight in weights.items():
            checkpoint.changed[f"{name}.weight"] = weight.float() * scales
    changed = set(checkpoint.changed)
    for one, other in zip(expected, network.results(index), strict=True):
        if float((one - other).norm()) > _TOLERANCE * float(one.norm()):
            raise UnsupportedError(
                f"awq is not possible for {network.config.model_type}: its layers are not put together in the usual way"
            )
    return changed


def _scales(rows: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """[inputs]: with these the rounded weights make of the rows what is nearest to what the exact ones do."""
    sizes = rows.abs().mean(dim=0).clamp_(min=_LEAST)
    best, chosen = float("inf"), torch.ones_like(sizes)
    for power in _POWERS:
        scales = sizes**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = sum(_loss(rows, weight.float(), scales) for weight in weights)
        if loss < best:
            best, chosen = loss, scales
    return chosen


def _loss(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> float:
    error = round_integers(weight * scales, 4, GROUP).dequantized() / scales - weight
    return float((rows @ error.T).square().sum())


def _apply_to_maker(
    network: LayerwiseNetwork, checkpoint: ChangedCheckpoint, link: _Link, scales: torch.Tensor
) -> torch.Tensor:
    """Divide what makes the inputs; returns the scales that are left after its rounding to the stored datatype."""
    weight = checkpoint.tensor(f"{link.maker}.weight")
    bias = f"{link.maker}.bias"
    if link.is_norm:
        offset = 1.0 if network.config.norm_kind == "rms_plus_one" else 0.0
        before = weight.float() + offset
        divided = (before / scales - offset).to(weight.dtype)
        after = divided.float() + offset
        checkpoint.changed[f"{link.maker}.weight"] = divided
        is_kept = (before != 0) & (after != 0)
        scales = torch.where(is_kept, before / torch.where(is_kept, after, 1.0), scales)
        shared = slice(None)
    else:
        shared = slice(weight.shape[0] - len(scales), None)
        divided = weight.float().clone()
        divided[shared] /= scales[:, None]
        checkpoint.changed[f"{link.maker}.weight"] = divided
    if bias in checkpoint:
        values = checkpoint.tensor(bias)
        divided = values.float().clone()
        divided[shared] /= scales
        checkpoint.changed[bias] = divided.to(values.dtype)
    return scales


def _links(network: LayerwiseNetwork, checkpoint: ChangedCheckpoint, index: int) -> Iterator[_Link]:
    """In an order in which the scales of one do not depend on another's."""
    config, names, prefix = network.config, network.names, network.layer_prefix(index)

    def there(*modules: str) -> tuple[str, ...]:
        return tuple(prefix + name for name in modules if checkpoint.module(prefix + name) is not None)

    if config.latent is None:  # else the norm is read by layers that stay in floats
        attention = there(names.qkv) or there(names.query, names.key, names.value)
        values = there(names.qkv) or there(names.value)
        if config.has_pre_norm:
            yield _Link(prefix + names.attention_pre_norm, attention, is_norm=True)
        if config.num_kv_heads == config.num_heads:
            yield _Link(values[0], there(names.attention_output))
    is_sparse = index in config.moe_layers
    up = there(names.gate_up) or there(names.gate, names.up)
    if config.has_pre_norm and not is_sparse:  # routers read the norm of sparse layers
        yield _Link(prefix + names.mlp_pre_norm, up, is_norm=True)
    if config.is_gated and not is_sparse:
        yield _Link(up[-1], there(names.down))
    if config.is_gated and is_sparse and config.moe is not None:
        inner = [f"{names.experts}.{expert}" for expert in range(config.moe.num_experts)]
        for expert in (*inner, names.shared_expert):
            ups, downs = there(f"{expert}.{names.expert_up}"), there(f"{expert}.{names.expert_down}")
            if ups and downs:
                yield _Link(ups[0], downs)
