"""How much a quantized model still says what its source says: perplexity and next tokens on a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import open_checkpoint, text_config
from .layerwise import LayerwiseNetwork
from .quantization import find_scheme


@dataclass(frozen=True, slots=True)
class QuantizationQuality:
    """Of a text's tokens, each but the first. `agreement`: the share at which the likeliest token is the same.

    `divergence`: the mean KL divergence in nats of the predictions before from those after, over the whole vocabulary;
    `divergence_p99`: what 99 of 100 positions do not exceed.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    agreement: float
    divergence: float
    divergence_p99: float


def compare_on_text(source: Path, target: Path, text: str) -> QuantizationQuality:
    """Both models read at most the first 4096 tokens of a text, a layer of each at a time in memory.

    Raises as `LayerwiseNetwork` does.
    """
    before, after = _finished(source, text), _finished(target, text)
    divergences, agreements, losses = [], [], []
    for (logits, targets), (others, _) in zip(before.predictions(), after.predictions(), strict=True):
        own, other = logits.log_softmax(dim=1), others.log_softmax(dim=1)
        divergences.append((own.exp() * (own - other)).sum(dim=1))
        agreements.append(own.argmax(dim=1) == other.argmax(dim=1))
        losses.append(torch.stack([-each.gather(1, targets[:, None])[:, 0] for each in (own, other)]))
    divergence = torch.cat(divergences).double().clamp(min=0.0)
    loss = torch.cat(losses, dim=1).double().mean(dim=1)
    return QuantizationQuality(
        num_tokens=len(divergence),
        perplexity_before=math.exp(loss[0]),
        perplexity_after=math.exp(loss[1]),
        agreement=float(torch.cat(agreements).double().mean()),
        divergence=float(divergence.mean()),
        divergence_p99=float(divergence.quantile(0.99)),
    )


def _finished(place: Path, text: str) -> LayerwiseNetwork:
    with open_checkpoint(place) as checkpoint:
        scheme = find_scheme(None, {**checkpoint.config, **text_config(checkpoint)})
        return LayerwiseNetwork(checkpoint, text, scheme).finish()
