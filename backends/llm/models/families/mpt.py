"""MPT: linear biases by position, no biases of layers or norms, values of attention that may be clipped."""

from __future__ import annotations

import torch

from modelserver.backend import UnsupportedError

from ...step_context import StepContext
from ..build import DecoderBuilder
from ..decoder import Block
from ..decoder_config import DecoderConfig, Names
from ..linear import Linear
from .family import Family
from .readers import Entries, older_config

# What llm-foundry writes and nothing else: of these values, networks differ in what is not computed here.
_USUAL = {"attn_type": "multihead_attention", "alibi": True, "qk_ln": False, "prefix_lm": False}


class Mpt(Family):
    model_type = "mpt"
    names = Names(
        embedding="wte",
        norm="norm_f",
        layer="blocks.{}",
        qkv="attn.Wqkv",
        attention_output="attn.out_proj",
        attention_pre_norm="norm_1",
        mlp_pre_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
    )

    def read_config(self, entries: Entries) -> DecoderConfig:
        attention = entries.get("attn_config") or {}
        for name, usual in _USUAL.items():
            if attention.get(name, usual) != usual:
                raise UnsupportedError(
                    f"config.json of this mpt has attn_config.{name} {attention[name]!r}: only {usual!r} is supported"
                )
        if entries.get("logit_scale") is not None or not entries.get("no_bias", True):
            raise UnsupportedError("config.json of this mpt has logit_scale, or no_bias false: not supported")
        clip = attention.get("clip_qkv")
        self._clip = None if clip is None else float(clip)
        num_layers, num_heads = int(entries["n_layers"]), int(entries["n_heads"])
        hidden_size = int(entries["d_model"])
        renamed = {
            "hidden_size": hidden_size,
            "intermediate_size": int(entries.get("expansion_ratio", 4)) * hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "max_position_embeddings": entries.get("max_seq_len"),
            "hidden_act": "gelu",
            "tie_word_embeddings": entries.get("tie_word_embeddings", True),
        }
        return older_config(
            entries,
            renamed,
            slopes=_slopes(num_heads, float(attention.get("alibi_bias_max", 8))),
            attention_scale=float(attention.get("softmax_scale") or (hidden_size / num_heads) ** -0.5),
            norm_kind="layer_unbiased",
        )

    def attention(self, build: DecoderBuilder, index: int) -> Block:
        qkv = build.qkv(index)
        return build.attention(index, qkv=qkv if self._clip is None else _Clipped(qkv, self._clip))


def _slopes(num_heads: int, steepest: float) -> tuple[float, ...]:
    """Of the next power of 2, of which each second one comes first where heads are fewer."""
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-steepest * number / power) for number in range(1, power + 1)]
    return tuple(slopes if power == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads])


class _Clipped:
    def __init__(self, linear: Linear, most: float) -> None:
        self._linear = linear
        self._most = most

    def __call__(self, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return self._linear(rows, step).clamp_(-self._most, self._most)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext | None, /) -> torch.Tensor:
        return residual.add_(self(rows, step))
