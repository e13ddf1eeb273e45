"""What a GGUF file says of its network: the metadata of its architecture, and the names of its modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .gguf_file import GgufFile, TensorPlace
from .gguf_types import BY_NAME

Entries = dict[str, Any]

TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
LAYER = {
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
# The factors of these tensors are in the config.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`top` and `layer` give each module of the file its name in the network; {} is an expert's number.

    `fused`: modules of a layer that the network has as several of equal size, one below the other.
    `interleaves_heads`: rows of queries and keys are in the order in which llama.cpp turns them. `norm_offset`: how
    much more the file's norms are than those of transformers. `is_transposed`: that has linear weights as [in, out].
    """

    model_type: str
    entries: Callable[[Metadata], Entries]
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer_name: str = "layers.{}"
    interleaves_heads: bool = False
    norm_offset: float = 0.0
    is_transposed: bool = False


class Metadata:
    """What the metadata of one architecture say, by the names without its prefix.

    Of a model in several files, `file` is the first, which has the metadata; `tensors` are those of all.
    """

    def __init__(self, files: Sequence[GgufFile]) -> None:
        self.file = files[0]
        self.name = self.file.text("general.architecture") or ""
        self._file_of = {name: file for file in files for name in file.tensors}
        self.tensors: Mapping[str, TensorPlace] = {name: file.tensors[name] for name, file in self._file_of.items()}

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
        for place in self.tensors.values():
            if len(place.shape) > 1:
                counts[place.kind.name] = counts.get(place.kind.name, 0) + place.num_bytes
        most = max(counts, key=lambda name: counts[name], default="F32")
        if BY_NAME[most].is_quantized:
            return "bfloat16"
        return {"F16": "float16", "BF16": "bfloat16"}.get(most, "float32")

    def matrix(self, name: str) -> TensorPlace:
        found = self.tensors.get(name)
        if found is None or len(found.shape) != 2:
            raise InvalidArgumentError(f"{self.file.path} has no matrix {name}")
        return found

    def factors(self, name: str) -> list[float] | None:
        if name not in self.tensors:
            return None
        file = self._file_of[name]
        if self.tensors[name].kind.name != "F32":
            raise InvalidArgumentError(f"{file.path}: tensor {name} is not in F32")
        return [float(value) for value in file.rows(name).reshape(-1).view(np.float32)]

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


def common_entries(metadata: Metadata, head_dim: int | None = None) -> Entries:
    """What all architectures with rotations and RMS norms share. `head_dim`: where the metadata mean another by it."""
    head_dim = head_dim or metadata.head_dim
    embedding = metadata.matrix("token_embd.weight")
    heads = metadata.integer("attention.head_count")
    entries: Entries = {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.optional_integer("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.optional_integer("context_length") or 2048,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base") or 10000.0,
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "dtype": metadata.dtype(),
    }
    rotated = metadata.optional_integer("rope.dimension_count")
    if rotated is not None and rotated != head_dim:
        entries["partial_rotary_factor"] = rotated / head_dim
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
    scaling: Entries = {"rope_type": "yarn", "factor": factor, **lengths}
    if metadata.name != "deepseek2":
        metadata.refuse("rope.scaling.yarn_log_multiplier")
    elif multiplier := metadata.number("rope.scaling.yarn_log_multiplier"):
        # Of latent attention, whose rotations are as long as ever; it sharpens its scores alone.
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    for name in ("beta_fast", "beta_slow"):
        if (value := metadata.number(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = value
    if magnitude != 1.0:
        scaling["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0)
    return scaling
