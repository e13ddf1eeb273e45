"""GPT-Neo: learned positions, layers that see everything and layers with a window, scores that are not scaled."""

from __future__ import annotations

from ..decoder_config import DecoderConfig, Names
from .family import Family
from .readers import Entries, older_config


class GptNeo(Family):
    model_type = "gpt_neo"
    names = Names(
        embedding="wte",
        positions="wpe",
        norm="ln_f",
        layer="h.{}",
        query="attn.attention.q_proj",
        key="attn.attention.k_proj",
        value="attn.attention.v_proj",
        attention_output="attn.attention.out_proj",
        attention_pre_norm="ln_1",
        mlp_pre_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
    )

    def read_config(self, entries: Entries) -> DecoderConfig:
        hidden_size, num_layers = int(entries["hidden_size"]), int(entries["num_layers"])
        kinds = [kind for period, count in entries["attention_types"] for kind in period * count]
        by_kind = {"global": None, "local": entries.get("window_size", 256)}
        renamed = {
            "num_hidden_layers": num_layers,
            "num_attention_heads": entries["num_heads"],
            "intermediate_size": entries.get("intermediate_size") or 4 * hidden_size,
            "hidden_act": entries.get("activation_function", "gelu_new"),
            "tie_word_embeddings": entries.get("tie_word_embeddings", True),
        }
        return older_config(
            entries,
            renamed,
            windows=tuple(by_kind[kind] for kind in kinds),
            attention_scale=1.0,
        )
