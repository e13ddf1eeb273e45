"""GPT-2: learned positions, layer norms, transposed weights, a plain feed-forward."""

from __future__ import annotations

from modelserver.backend import UnsupportedError

from ..decoder_config import DecoderConfig, Names
from .family import Family
from .readers import Entries, older_config


class Gpt2(Family):
    model_type = "gpt2"
    names = Names(
        embedding="wte",
        positions="wpe",
        norm="ln_f",
        layer="h.{}",
        qkv="attn.c_attn",
        attention_output="attn.c_proj",
        attention_pre_norm="ln_1",
        mlp_pre_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        is_transposed=True,
    )

    def read_config(self, entries: Entries) -> DecoderConfig:
        if entries.get("scale_attn_by_inverse_layer_idx") or not entries.get("scale_attn_weights", True):
            raise UnsupportedError("config.json of this gpt2 scales attention by layer or not at all: not supported")
        renamed = {
            "hidden_size": entries["n_embd"],
            "num_hidden_layers": entries["n_layer"],
            "num_attention_heads": entries["n_head"],
            "max_position_embeddings": entries["n_positions"],
            "intermediate_size": entries.get("n_inner") or 4 * entries["n_embd"],
            "hidden_act": entries.get("activation_function", "gelu_new"),
            "tie_word_embeddings": True,
        }
        return older_config(entries, renamed)
