"""Llama, and the decoders that differ from it in windows alone or in fused tensors."""

from __future__ import annotations

from ..decoder_config import DecoderConfig, MoeConfig, Names
from .family import Family
from .readers import Entries, base_config, uniform_windows


class Llama(Family):
    model_type = "llama"


class Mistral(Family):
    model_type = "mistral"

    def read_config(self, entries: Entries) -> DecoderConfig:
        return base_config(entries, windows=uniform_windows(entries))


class Phi3(Mistral):
    """Its projections are stored fused, which the builder sees."""

    model_type = "phi3"


class Mixtral(Family):
    model_type = "mixtral"
    names = Names(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    )

    def read_config(self, entries: Entries) -> DecoderConfig:
        moe = MoeConfig(
            num_experts=int(entries["num_local_experts"]),
            num_experts_per_tok=int(entries["num_experts_per_tok"]),
            intermediate_size=int(entries["intermediate_size"]),
            is_normalised=True,
        )
        layers = frozenset(range(int(entries["num_hidden_layers"])))
        return base_config(entries, windows=uniform_windows(entries), moe=moe, moe_layers=layers)
