"""What a checkpoint's config.json says, in the terms of our decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import Checkpoint
from .config_check import check_config
from .rope import Rope, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts of the sparse layers. `shared_intermediate_size` 0: there is no shared expert."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    is_normalised: bool
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The switches of `Decoder`. Tuples have an entry per layer; a window of None sees everything."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    ropes: tuple[Rope | None, ...]
    norm_kind: str = "rms"  # "rms" | "rms_plus_one" (the weight is stored less one) | "layer"
    norm_eps: float = 1e-6
    has_pre_norm: bool = True
    has_post_norm: bool = False
    qk_norm: str | None = None  # None | "head" | "all" (over all heads together)
    activation: str = "silu"
    is_gated: bool = True
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    is_tied: bool = False
    moe: MoeConfig | None = None
    moe_layers: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    dtype: str = "float32"

    @property
    def longest(self) -> int:
        """How many positions the scaling of the rotations stretches to."""
        stretched = [rope.longest for rope in self.ropes if rope is not None]
        return max([self.max_position_embeddings, *stretched])


def text_entries(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The checkpoint's config; of a multi-modal model, its text part."""
    entries = checkpoint.config
    text = entries.get("text_config")
    if isinstance(text, dict):
        outer = {name: entries[name] for name in ("dtype", "torch_dtype", "eos_token_id") if name in entries}
        entries = {**outer, "model_type": f"{entries['model_type']}_text", **text}
    return entries


def read_config(checkpoint: Checkpoint) -> DecoderConfig:
    """InvalidArgumentError for an entry that is missing or none, UnsupportedError for rotations that we do not know."""
    entries, path = text_entries(checkpoint), checkpoint.place / "config.json"
    model_type = entries["model_type"]
    try:
        config = _FAMILIES[model_type](entries)
    except KeyError as error:
        raise InvalidArgumentError(f"{path} of a {model_type} has no {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError, MemoryError) as error:
        raise InvalidArgumentError(
            f"{path} of a {model_type} has an entry that cannot be used: {type(error).__name__}: {error}"
        ) from error
    check_config(config, path)
    return replace(config, eos_token_ids=checkpoint.eos_token_ids)


def read_dtype(entries: Mapping[str, Any]) -> str:
    """`dtype` since transformers 5, `torch_dtype` before."""
    return str(entries.get("dtype") or entries.get("torch_dtype") or "float32")


def is_known(model_type: str) -> bool:
    """Whether our decoder runs it; the others go to transformers."""
    return model_type in _FAMILIES


def _base(entries: Mapping[str, Any], **switches: Any) -> DecoderConfig:
    """What Llama-shaped configs share."""
    num_layers, num_heads = int(entries["num_hidden_layers"]), int(entries["num_attention_heads"])
    head_dim = int(entries.get("head_dim") or entries["hidden_size"] // num_heads)
    values: dict[str, Any] = {
        "model_type": entries["model_type"],
        "vocab_size": int(entries["vocab_size"]),
        "hidden_size": int(entries["hidden_size"]),
        "intermediate_size": int(entries["intermediate_size"]),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": int(entries.get("num_key_value_heads") or num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": int(entries.get("max_position_embeddings") or 2048),
        "windows": (None,) * num_layers,
        "ropes": _ropes(entries, head_dim, num_layers),
        "norm_eps": float(entries.get("rms_norm_eps") or 1e-6),
        "activation": entries.get("hidden_act") or entries.get("hidden_activation") or "silu",
        "attention_scale": head_dim**-0.5,
        "is_tied": bool(entries.get("tie_word_embeddings", False)),
        "dtype": read_dtype(entries),
    }
    return DecoderConfig(**{**values, **switches})


def _ropes(entries: Mapping[str, Any], head_dim: int, num_layers: int) -> tuple[Rope, ...]:
    parameters = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    if "full_attention" in parameters:  # a set for each type of layer
        by_type = {
            name: read_rope(values, head_dim=head_dim, config=entries) for name, values in parameters.items() if values
        }
        return tuple(by_type[name] for name in _layer_types(entries, num_layers))
    return (read_rope(parameters, head_dim=head_dim, config=entries),) * num_layers


def _layer_types(entries: Mapping[str, Any], num_layers: int) -> list[str]:
    """Explicit since transformers 4.5x; before, patterns said which layers slide."""
    given = entries.get("layer_types")
    if given:
        return list(given)
    pattern = entries.get("sliding_window_pattern") or entries.get("_sliding_window_pattern")
    if entries["model_type"] == "gemma2":
        pattern = 2
    else:
        pattern = pattern or {"gemma3_text": 6, "olmo3": 4}.get(entries["model_type"])
    if pattern:
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]
    return ["full_attention"] * num_layers


def _uniform_windows(entries: Mapping[str, Any]) -> tuple[int | None, ...]:
    return (entries.get("sliding_window") or None,) * int(entries["num_hidden_layers"])


def _typed_windows(entries: Mapping[str, Any]) -> tuple[int | None, ...]:
    types = _layer_types(entries, int(entries["num_hidden_layers"]))
    return tuple(int(entries["sliding_window"]) if name == "sliding_attention" else None for name in types)


def _qwen_windows(entries: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's sliding layers are those from `max_window_layers` on, and only if `use_sliding_window` says so."""
    num_layers = int(entries["num_hidden_layers"])
    window = entries.get("sliding_window") if entries.get("use_sliding_window") else None
    if not window:
        return (None,) * num_layers
    if entries.get("layer_types"):
        return _typed_windows(entries)
    first = int(entries.get("max_window_layers") or 0)
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))


def _llama(entries: Mapping[str, Any]) -> DecoderConfig:
    return _base(entries)


def _mistral(entries: Mapping[str, Any]) -> DecoderConfig:
    return _base(entries, windows=_uniform_windows(entries))


def _qwen2(entries: Mapping[str, Any]) -> DecoderConfig:
    return _base(entries, windows=_qwen_windows(entries))


def _qwen3(entries: Mapping[str, Any]) -> DecoderConfig:
    return _base(entries, windows=_qwen_windows(entries), qk_norm="head")


def _gemma(entries: Mapping[str, Any], **switches: Any) -> DecoderConfig:
    """`hidden_act` of Gemma's first checkpoints says "gelu" and means its tanh approximation."""
    activation = entries.get("hidden_activation") or "gelu_pytorch_tanh"
    scale = float(entries["hidden_size"]) ** 0.5
    return _base(entries, norm_kind="rms_plus_one", activation=activation, embedding_scale=scale, **switches)


def _gemma2(entries: Mapping[str, Any]) -> DecoderConfig:
    return _gemma(
        entries,
        has_post_norm=True,
        windows=_typed_windows(entries),
        attention_scale=float(entries["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=entries.get("attn_logit_softcapping"),
        logit_softcap=entries.get("final_logit_softcapping"),
    )


def _gemma3(entries: Mapping[str, Any]) -> DecoderConfig:
    """Local layers turn with a base of their own; the scaling of older configs is for the global ones alone."""
    local_theta = float(entries.get("rope_local_base_freq") or 1e4)
    return replace(_gemma2(_with_ropes_by_type(entries, theta=1e6, local_theta=local_theta)), qk_norm="head")


def _mixtral(entries: Mapping[str, Any]) -> DecoderConfig:
    moe = MoeConfig(
        num_experts=int(entries["num_local_experts"]),
        num_experts_per_tok=int(entries["num_experts_per_tok"]),
        intermediate_size=int(entries["intermediate_size"]),
        is_normalised=True,
    )
    layers = frozenset(range(int(entries["num_hidden_layers"])))
    return _base(entries, windows=_uniform_windows(entries), moe=moe, moe_layers=layers)


def _qwen_moe(entries: Mapping[str, Any], **switches: Any) -> DecoderConfig:
    """Layer i is sparse if (i + 1) is a multiple of `decoder_sparse_step` and it is not among `mlp_only_layers`."""
    moe = MoeConfig(
        num_experts=int(entries.get("num_experts") or entries["num_local_experts"]),
        num_experts_per_tok=int(entries["num_experts_per_tok"]),
        intermediate_size=int(entries["moe_intermediate_size"]),
        is_normalised=bool(entries.get("norm_topk_prob", False)),
        shared_intermediate_size=int(entries.get("shared_expert_intermediate_size") or 0),
    )
    step = int(entries.get("decoder_sparse_step") or 1)
    dense = set(entries.get("mlp_only_layers") or ())
    layers = frozenset(
        layer for layer in range(int(entries["num_hidden_layers"])) if (layer + 1) % step == 0 and layer not in dense
    )
    return _base(entries, moe=moe, moe_layers=layers, **switches)


def _qwen2_moe(entries: Mapping[str, Any]) -> DecoderConfig:
    return _qwen_moe(entries, windows=_qwen_windows(entries))


def _qwen3_moe(entries: Mapping[str, Any]) -> DecoderConfig:
    """All of its layers slide, or none does."""
    windows = _uniform_windows(entries) if entries.get("use_sliding_window") else _base(entries).windows
    return _qwen_moe(entries, windows=windows, qk_norm="head")


def _olmo2(entries: Mapping[str, Any], **switches: Any) -> DecoderConfig:
    return _base(entries, has_pre_norm=False, has_post_norm=True, qk_norm="all", **switches)


def _olmo3(entries: Mapping[str, Any]) -> DecoderConfig:
    """Its scaling of rotations is for the layers that see everything."""
    theta = float(entries.get("rope_theta") or 5e5)
    entries = _with_ropes_by_type(entries, theta=theta, local_theta=theta)
    return _olmo2(entries, windows=_typed_windows(entries))


def _with_ropes_by_type(entries: Mapping[str, Any], *, theta: float, local_theta: float) -> Mapping[str, Any]:
    """`rope_parameters` by the type of a layer, as configs had not before transformers 5."""
    if entries.get("rope_parameters"):
        return entries
    full = {"rope_theta": entries.get("rope_theta") or theta, **(entries.get("rope_scaling") or {})}
    by_type = {"full_attention": full, "sliding_attention": {"rope_theta": local_theta}}
    return {**entries, "rope_parameters": by_type}


def _gpt2(entries: Mapping[str, Any]) -> DecoderConfig:
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
    return _base(
        {**entries, **renamed},
        ropes=(None,) * int(entries["n_layer"]),
        norm_kind="layer",
        norm_eps=float(entries.get("layer_norm_epsilon", 1e-5)),
        is_gated=False,
    )


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _mistral,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "gpt2": _gpt2,
}
