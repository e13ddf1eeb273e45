"""Tiny random EAGLE-3 heads in the form that checkpoints have, and what they guess, computed anew for each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import reference_model
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

NUM_LAYERS_READ = 3


def write_eagle(base: Path, place: Path, *, layers: Sequence[int] = (0, 1, 2), **values: Any) -> Path:
    """A head for the model in `base` that knows every other token. `values` go into its config.json."""
    config = json.loads((base / "config.json").read_text())
    size, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    width = config.get("head_dim") or size // heads
    kv_heads = config["num_key_value_heads"]
    draft_vocab = config["vocab_size"] // 2
    draw = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    tensors = {
        "fc.weight": matrix(size, NUM_LAYERS_READ * size),
        "midlayer.self_attn.q_proj.weight": matrix(heads * width, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * width, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * width, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, heads * width),
        "midlayer.mlp.gate_proj.weight": matrix(inner, size),
        "midlayer.mlp.up_proj.weight": matrix(inner, size),
        "midlayer.mlp.down_proj.weight": matrix(size, inner),
        "lm_head.weight": matrix(draft_vocab, size),
        "d2t": torch.arange(draft_vocab),
        "t2d": torch.arange(config["vocab_size"]) % 2 == 0,
    }
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    tensors |= {f"{norm}.weight": 1 + 0.1 * torch.randn(size, generator=draw) for norm in norms}
    place.mkdir(parents=True)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    described = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        **values,
    }
    (place / "config.json").write_text(json.dumps(described))
    return place


class Reference:
    """What a head guesses by transformers' hidden states and rotations, without a cache."""

    def __init__(self, base: Path, place: Path) -> None:
        self._model = reference_model(base)
        self._config = json.loads((place / "config.json").read_text())
        self._tensors = load_file(place / "model.safetensors")
        self._layers = self._config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    def guesses(self, token_ids: Sequence[int], count: int) -> list[int]:
        with torch.no_grad():
            before_norm: list[torch.Tensor] = []
            norm = self._model.model.norm
            with norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0])):
                found = self._model(torch.tensor([list(token_ids[:-1])]), output_hidden_states=True)
            all_states = [*found.hidden_states[:-1], before_norm[0]]
            states = torch.cat([all_states[layer][0] for layer in self._layers], dim=-1)
            states = states @ self._tensors["fc.weight"].T
            tokens, guessed = list(token_ids[1:]), []
            for _ in range(count):
                hidden = self._layer(tokens, states)
                best = int((self._norm(hidden[-1:], "norm") @ self._tensors["lm_head.weight"].T).argmax())
                guessed.append(best + int(self._tensors["d2t"][best]))
                tokens.append(guessed[-1])
                states = torch.cat((states, hidden[-1:]))
        return guessed

    def _layer(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        embedded = self._model.get_input_embeddings()(torch.tensor(tokens))
        rows = torch.cat(
            (self._norm(embedded, "midlayer.input_layernorm"), self._norm(states, "midlayer.hidden_norm")), -1
        )
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        queries, keys, values = (
            (rows @ self._tensors[f"midlayer.self_attn.{name}_proj.weight"].T)
            .view(len(rows), count, -1)
            .transpose(0, 1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        rotary = LlamaRotaryEmbedding(LlamaConfig(**{key: self._config[key] for key in _ROTARY if key in self._config}))
        cosines, sines = rotary(rows, torch.arange(len(rows))[None])
        queries, keys = apply_rotary_pos_emb(queries[None], keys[None], cosines, sines)
        keys, values = (each.repeat_interleave(heads // kv_heads, 0) for each in (keys[0], values))
        scores = queries[0] @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5
        hidden_from = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden_from, -torch.inf).softmax(-1) @ values
        hidden = states + mixed.transpose(0, 1).flatten(1) @ self._tensors["midlayer.self_attn.o_proj.weight"].T
        inner = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (self._tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        size = (rows.shape[-1],)
        eps = self._config["rms_norm_eps"]
        return torch.nn.functional.rms_norm(rows, size, self._tensors[f"{name}.weight"], eps)


_ROTARY = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
