"""The architectures of GGUF files that our families run: their names of tensors, and what their metadata say.

Both become what a checkpoint of transformers has: modules inside the decoder, and the entries of a config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .gguf_file import GgufFile
from .gguf_types import BY_NAME

Entries = dict[str, Any]

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_BOTH_SIDES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The factors of these tensors are in the config.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# What the published sizes of Gemma scale attention by, which their files do not say: layers of those that differ.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`top` and `layer` give each module of the file its name in the decoder; {} is an expert's number.

    `interleaves_heads`: rows of queries and keys are in the order in which llama.cpp turns them. `norm_offset`: how
    much more the file's norms are than those of transformers. `is_transposed`: that has linear weights as [in, out].
    """

    model_type: str
    entries: Callable[[Metadata], Entries]
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    layer_name: str = "layers.{}"
    interleaves_heads: bool = False
    norm_offset: float = 0.0
    is_transposed: bool = False


class Metadata:
    """What the metadata of one architecture say, by the names without its prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = file.text("general.architecture") or ""

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if value is None:
            raise InvalidArgumentError(f"{self.file.path} has no metadata {self.name}.{key}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Of an array, which has a number for each layer: the one that all share."""
        key = f"{self.name}.{key}"
        if not self.file.is_array(key):
            return self.file.integer(key)
        values = self.file.numbers(key)
        distinct = [] if values is None else np.unique(values).tolist()
        if len(distinct) != 1:
            raise UnsupportedError(f"{self.file.path}: {key} differs between layers, which is not supported")
        return int(distinct[0])

    def number(self, key: str) -> float | None:
        return self.file.number(f"{self.name}.{key}")

    def text(self, key: str) -> str | None:
        return self.file.text(f"{self.name}.{key}")

    def refuse(self, *keys: str) -> None:
        """UnsupportedError for what changes the network in a way that our family does not have."""
        for key in keys:
            if self.number(key):
                raise UnsupportedError(f"{self.file.path}: {self.name}.{key} is not supported")

    @property
    def head_dim(self) -> int:
        length = self.optional_integer("attention.key_length")
        if length is None:
            return self.integer("embedding_length") // max(1, self.integer("attention.head_count"))
        values = self.optional_integer("attention.value_length")
        if values not in (None, length):
            raise UnsupportedError(f"{self.file.path}: values of {values} beside keys of {length} are not supported")
        return length

    @property
    def num_layers(self) -> int:
        return self.integer("block_count")

    def dtype(self) -> str:
        """The type of most weights in floats; bfloat16 if most are quantized."""
        counts: dict[str, int] = {}
        for place in self.file.tensors.values():
            if len(place.shape) > 1:
                counts[place.kind.name] = counts.get(place.kind.name, 0) + place.num_bytes
        most = max(counts, key=lambda name: counts[name], default="F32")
        if BY_NAME[most].is_quantized:
            return "bfloat16"
        return {"F16": "float16", "BF16": "bfloat16"}.get(most, "float32")

    def factors(self, name: str) -> list[float] | None:
        if name not in self.file.tensors:
            return None
        if self.file.place(name).kind.name != "F32":
            raise InvalidArgumentError(f"{self.file.path}: tensor {name} is not in F32")
        return [float(value) for value in self.file.rows(name).reshape(-1).view(np.float32)]

    def layer_types(self, usual_pattern: int) -> list[str]:
        """Of layers with a sliding window: one in a period attends to everything, or an array says which ones slide."""
        key = f"{self.name}.attention.sliding_window_pattern"
        slides: list[bool]
        if self.file.is_array(key):
            found = self.file.numbers(key)
            slides = [bool(value) for value in found] if found is not None else []
            if len(slides) < self.num_layers:
                raise InvalidArgumentError(f"{self.file.path}: {key} has {len(slides)} entries: expected one per layer")
        else:
            period = self.file.integer(key) or usual_pattern
            slides = [(index + 1) % period != 0 for index in range(self.num_layers)]
        return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides[: self.num_layers]]


def _common(metadata: Metadata) -> Entries:
    """What all architectures with rotations and RMS norms share."""
    embedding = metadata.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InvalidArgumentError(f"{metadata.file.path} has no matrix token_embd.weight")
    heads = metadata.integer("attention.head_count")
    entries: Entries = {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.optional_integer("attention.head_count_kv") or heads,
        "head_dim": metadata.head_dim,
        "max_position_embeddings": metadata.optional_integer("context_length") or 2048,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base") or 10000.0,
        "tie_word_embeddings": "output.weight" not in metadata.file.tensors,
        "dtype": metadata.dtype(),
    }
    rotated = metadata.optional_integer("rope.dimension_count")
    if rotated is not None and rotated != metadata.head_dim:
        entries["partial_rotary_factor"] = rotated / metadata.head_dim
    if scaling := _rope_scaling(metadata, entries):
        entries["rope_scaling"] = scaling
    if window := metadata.optional_integer("attention.sliding_window"):
        entries["sliding_window"] = window
    return entries


def _rope_scaling(metadata: Metadata, entries: Entries) -> Entries | None:
    original = metadata.optional_integer("rope.scaling.original_context_length")
    magnitude = metadata.number("rope.scaling.attn_factor") or 1.0
    lengths = {"original_max_position_embeddings": original or entries["max_position_embeddings"]}
    long, short = metadata.factors(ROPE_LONG), metadata.factors(ROPE_SHORT)
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": magnitude,
            **lengths,
        }
    # Llama 3 writes what its frequencies are divided by.
    frequencies = metadata.factors(ROPE_FREQS)
    if frequencies is not None and any(factor != 1.0 for factor in frequencies):
        return {
            "rope_type": "longrope",
            "long_factor": frequencies,
            "short_factor": frequencies,
            "attention_factor": 1.0,
            **lengths,
        }
    factor = metadata.number("rope.scaling.factor") or metadata.number("rope.scale_linear")
    kind = metadata.text("rope.scaling.type") or ("linear" if factor else "none")
    if kind in ("none", "longrope") or not factor:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedError(f"{metadata.file.path}: {metadata.name}.rope.scaling.type {kind!r} is not supported")
    metadata.refuse("rope.scaling.yarn_log_multiplier")
    scaling: Entries = {"rope_type": "yarn", "factor": factor, **lengths}
    for name in ("beta_fast", "beta_slow"):
        if (value := metadata.number(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = value
    if magnitude != 1.0:
        scaling["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0)
    return scaling


def _softmax_router(metadata: Metadata) -> None:
    """UnsupportedError for routers of another kind than our mixtures have."""
    metadata.refuse("expert_group_count")
    if metadata.optional_integer("expert_gating_func") not in (None, 0, 1):
        raise UnsupportedError(f"{metadata.file.path}: {metadata.name}.expert_gating_func is not softmax")
    if metadata.number("expert_weights_scale") not in (None, 0.0, 1.0):
        raise UnsupportedError(f"{metadata.file.path}: {metadata.name}.expert_weights_scale is not supported")


def _mixtral(metadata: Metadata) -> Entries:
    _softmax_router(metadata)
    return {
        **_common(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _sized_by(metadata: Metadata, name: str, dimension: int) -> int | None:
    """The length of a dimension of the first layer's tensor of a name."""
    for index in range(metadata.num_layers):
        place = metadata.file.tensors.get(f"blk.{index}.{name}.weight")
        if place is not None and len(place.shape) > dimension:
            return place.shape[dimension]
    return None


def _qwen_experts(metadata: Metadata) -> Entries:
    _softmax_router(metadata)
    is_normalised = metadata.file.flag(f"{metadata.name}.expert_weights_norm")
    usual = metadata.name == "qwen3moe"
    entries = {
        **_common(metadata),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": _sized_by(metadata, "ffn_up_exps", 1)
        or metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": usual if is_normalised is None else is_normalised,
        "mlp_only_layers": [
            index
            for index in range(metadata.num_layers)
            if f"blk.{index}.ffn_gate_inp.weight" not in metadata.file.tensors
        ],
    }
    if shared := _sized_by(metadata, "ffn_up_shexp", 0):
        entries["shared_expert_intermediate_size"] = shared
    entries.pop("sliding_window", None)
    return entries


def _qwen(metadata: Metadata) -> Entries:
    """The window of its configs is not used."""
    entries = _common(metadata)
    entries.pop("sliding_window", None)
    return entries


def _gemma2(metadata: Metadata) -> Entries:
    return {
        **_common(metadata),
        **_sliding(metadata, usual_pattern=2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": metadata.number("final_logit_softcapping") or 30.0,
    }


def _gemma3(metadata: Metadata) -> Entries:
    return {
        **_common(metadata),
        **_sliding(metadata, usual_pattern=6),
        "rope_theta": metadata.number("rope.freq_base") or 1e6,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa") or 1e4,
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
    }


def _sliding(metadata: Metadata, usual_pattern: int) -> Entries:
    scale = metadata.number("attention.scale")
    queries = float(metadata.head_dim)
    if scale:
        queries = scale**-2
    elif metadata.num_layers == _GEMMA_27B_LAYERS[metadata.name]:
        queries = metadata.integer("embedding_length") / metadata.integer("attention.head_count")
    return {
        "query_pre_attn_scalar": queries,
        "sliding_window": metadata.optional_integer("attention.sliding_window") or 4096,
        "layer_types": metadata.layer_types(usual_pattern),
    }


def _olmo3(metadata: Metadata) -> Entries:
    return {**_common(metadata), "layer_types": metadata.layer_types(4)}


def _gpt2(metadata: Metadata) -> Entries:
    embedding = metadata.file.place("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0],
        "n_embd": metadata.integer("embedding_length"),
        "n_layer": metadata.num_layers,
        "n_head": metadata.integer("attention.head_count"),
        "n_positions": metadata.integer("context_length"),
        "n_inner": metadata.integer("feed_forward_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon") or 1e-5,
        "tie_word_embeddings": True,
        "dtype": metadata.dtype(),
    }


_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def _gemma(model_type: str, entries: Callable[[Metadata], Entries], layer: Mapping[str, str]) -> Architecture:
    return Architecture(model_type=model_type, entries=entries, layer=layer, norm_offset=1.0)


def find_architecture(file: GgufFile) -> Architecture:
    """UnsupportedError for one that no family of ours runs."""
    metadata = Metadata(file)
    kind = file.text("general.type")
    if kind not in (None, "model"):
        raise UnsupportedError(f"{file.path} holds a GGUF {kind!r}, not a model")
    name = metadata.name
    if name in ("llama", "mistral3"):
        metadata.refuse("attention.temperature_scale", "attention.temperature_length")
        return _llama(metadata)
    if name == "olmo2" and metadata.optional_integer("attention.sliding_window"):
        return Architecture(model_type="olmo3", entries=_olmo3, layer=_LAYER | _BOTH_SIDES)
    found = _ARCHITECTURES.get(name)
    if found is None:
        known = ", ".join(sorted({"llama", "mistral3", *_ARCHITECTURES}))
        raise UnsupportedError(
            f"{file.path} holds a model of the architecture {name!r}, which is not read from GGUF: {known} are. "
            "Serve its checkpoint in safetensors"
        )
    return found


def written_architecture(model_type: str) -> tuple[str, Architecture]:
    """The name and the architecture of files that are written of a checkpoint. UnsupportedError names what is known."""
    known = {kind: ("llama", found) for kind, found in _LLAMAS.items()}
    known |= {_ARCHITECTURES[name].model_type: (name, _ARCHITECTURES[name]) for name in _WRITTEN}
    if model_type not in known:
        raise UnsupportedError(f"GGUF files of {model_type} are not written; of {', '.join(sorted(known))} they are")
    return known[model_type]


def _llama(metadata: Metadata) -> Architecture:
    if metadata.optional_integer("expert_count"):
        return _LLAMAS["mixtral"]
    return _LLAMAS["mistral" if metadata.optional_integer("attention.sliding_window") else "llama"]


# What llama.cpp calls by one name.
_LLAMAS = {
    "llama": Architecture(model_type="llama", entries=_common, interleaves_heads=True),
    "mistral": Architecture(model_type="mistral", entries=_common, interleaves_heads=True),
    "mixtral": Architecture(model_type="mixtral", entries=_mixtral, layer=_LAYER | _MIXTRAL, interleaves_heads=True),
}
_WRITTEN = ("qwen2", "qwen3", "qwen2moe", "qwen3moe")

_ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": Architecture(model_type="qwen2", entries=_qwen),
    "qwen3": Architecture(model_type="qwen3", entries=_qwen),
    "qwen2moe": Architecture(model_type="qwen2_moe", entries=_qwen_experts, layer=_LAYER | _EXPERTS),
    "qwen3moe": Architecture(model_type="qwen3_moe", entries=_qwen_experts, layer=_LAYER | _EXPERTS),
    "gemma": _gemma("gemma", _common, _LAYER),
    "gemma2": _gemma("gemma2", _gemma2, _LAYER | _BOTH_SIDES),
    "gemma3": _gemma("gemma3_text", _gemma3, _LAYER | _BOTH_SIDES),
    "phi3": Architecture(model_type="phi3", entries=_common, layer=_LAYER | {"ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Architecture(model_type="olmo2", entries=_common, layer=_LAYER | _BOTH_SIDES),
    "gpt2": Architecture(
        model_type="gpt2",
        entries=_gpt2,
        top={"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layer_name="h.{}",
        is_transposed=True,
    ),
}
