"""The metadata of a GGUF file that is written of a checkpoint: its config, tokenizer and chat templates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .checkpoint import Checkpoint, text_config
from .gguf_tokenizer import GPT2_PATTERN, NAMED_TOKENS, PATTERNS, PREFIX, SPACE, TokenKind
from .gguf_writing import MetadataValue

Metadata = dict[str, MetadataValue]
Entries = Mapping[str, Any]

_DIGIT = r"\p{N}"
_COUNTS = {
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}


def metadata_of(checkpoint: Checkpoint, name: str) -> Metadata:
    """All of a file whose architecture is called `name`. UnsupportedError for what GGUF has no words for."""
    entries = text_config(checkpoint)
    own = {f"{name}.{key}": value for key, value in _config(entries).items()}
    return {"general.architecture": name, **own, **_tokenizer(checkpoint, entries), **_templates(checkpoint)}


def rope_of(entries: Entries) -> dict[str, Any]:
    """How positions are turned, whichever way the config says it: `rope_type`, `rope_theta` and what belongs to it."""
    found = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    found = found.get("full_attention") or found
    kind = found.get("rope_type") or found.get("type") or "default"
    theta = found.get("rope_theta") or entries.get("rope_theta") or 10000.0
    return {**found, "rope_type": kind, "rope_theta": float(theta)}


def frequency_factors(entries: Entries) -> list[float] | None:
    """What each frequency is divided by, where lengths do not matter: Llama 3's. None if they are as they are."""
    rope = rope_of(entries)
    if rope["rope_type"] == "longrope" and entries["model_type"] != "phi3":
        if rope["long_factor"] != rope["short_factor"]:
            raise UnsupportedError(f"longrope of {entries['model_type']} cannot be said in a GGUF file")
        return [float(factor) for factor in rope["long_factor"]]
    if rope["rope_type"] != "llama3":
        return None
    dim, original = head_dim(entries), rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for index in range(0, dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        smooth = min(max((original / length - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def head_dim(entries: Entries) -> int:
    return int(entries.get("head_dim") or entries["hidden_size"] // entries["num_attention_heads"])


def num_layers(entries: Entries) -> int:
    return int(entries.get("num_hidden_layers") or entries["n_layer"])


def is_tied(entries: Entries) -> bool:
    """Whether the head is the embedding; what a config leaves out is what its family does."""
    usual = entries["model_type"].startswith(("gemma", "gpt2"))
    return bool(entries.get("tie_word_embeddings", usual))


def long_factors(entries: Entries) -> tuple[list[float], list[float]] | None:
    """What Phi-3's frequencies are divided by in long texts and in short ones."""
    rope = rope_of(entries)
    if rope["rope_type"] != "longrope" or entries["model_type"] != "phi3":
        return None
    return [float(each) for each in rope["long_factor"]], [float(each) for each in rope["short_factor"]]


def _config(entries: Entries) -> Metadata:
    if entries["model_type"] == "gpt2":
        return _gpt2(entries)
    if entries.get("use_sliding_window") and entries.get("sliding_window"):
        raise UnsupportedError("a window of some layers alone (use_sliding_window) cannot be said in a GGUF file")
    heads = entries["num_attention_heads"]
    found: Metadata = {
        "block_count": entries["num_hidden_layers"],
        "context_length": entries["max_position_embeddings"],
        "embedding_length": entries["hidden_size"],
        "feed_forward_length": entries["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": entries.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim(entries),
        "attention.value_length": head_dim(entries),
        "attention.layer_norm_rms_epsilon": float(entries["rms_norm_eps"]),
        "vocab_size": entries["vocab_size"],
        **_rope(entries),
        **_windows(entries),
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if entries.get(name):
            found[name] = float(entries[name])
    if entries.get("query_pre_attn_scalar"):
        found["attention.scale"] = float(entries["query_pre_attn_scalar"]) ** -0.5
    for key, names in _COUNTS.items():
        if value := next((entries[name] for name in names if entries.get(name)), None):
            found[key] = value
    if "norm_topk_prob" in entries:
        found["expert_weights_norm"] = bool(entries["norm_topk_prob"])
    return found | _shared_experts(entries) | _latent(entries)


# In families with DeepSeek's mixtures: layers without experts, if the config does not say.
_USUAL_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe": 1}


def _shared_experts(entries: Entries) -> Metadata:
    """Of the mixtures of DeepSeek V2 and V3, and of GLM-4.5."""
    if "n_routed_experts" not in entries:
        return {}
    if entries.get("moe_layer_freq") not in (None, 1):
        raise UnsupportedError("experts in some of the layers alone (moe_layer_freq) cannot be said in a GGUF file")
    is_sigmoid = entries["model_type"] != "deepseek_v2"
    is_grouped = is_sigmoid or entries.get("topk_method") == "group_limited_greedy"
    dense = entries.get("first_k_dense_replace")
    return {
        "leading_dense_block_count": _USUAL_DENSE[entries["model_type"]] if dense is None else dense,
        "expert_count": entries["n_routed_experts"],
        "expert_shared_count": entries.get("n_shared_experts") or 0,
        "expert_weights_scale": float(entries.get("routed_scaling_factor") or 1.0),
        "expert_weights_norm": bool(entries.get("norm_topk_prob", is_sigmoid)),
        "expert_gating_func": 2 if is_sigmoid else 1,
        "expert_group_count": (entries.get("n_group") or 1) if is_grouped else 1,
        "expert_group_used_count": (entries.get("topk_group") or 1) if is_grouped else 1,
    }


def _latent(entries: Entries) -> Metadata:
    """Of latent attention, as one head that all share: the key that is rotated, and the latent."""
    if "kv_lora_rank" not in entries:
        return {}
    if not entries.get("rope_interleave", True):
        raise UnsupportedError("rotations of halves (rope_interleave: false) are not written to GGUF files")
    rank, rope = int(entries["kv_lora_rank"]), int(entries["qk_rope_head_dim"])
    found: Metadata = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": int(entries["qk_nope_head_dim"]) + rope,
        "attention.value_length_mla": entries["v_head_dim"],
        "attention.kv_lora_rank": rank,
    }
    if entries.get("q_lora_rank"):
        found["attention.q_lora_rank"] = entries["q_lora_rank"]
    return found


def _gpt2(entries: Entries) -> Metadata:
    return {
        "block_count": entries["n_layer"],
        "context_length": entries["n_positions"],
        "embedding_length": entries["n_embd"],
        "feed_forward_length": entries.get("n_inner") or 4 * entries["n_embd"],
        "attention.head_count": entries["n_head"],
        "attention.layer_norm_epsilon": float(entries.get("layer_norm_epsilon") or 1e-5),
    }


# In families whose layers have windows: every how many layers one attends to everything, if the file does not say.
_USUAL_PERIODS = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}


def _windows(entries: Entries) -> Metadata:
    kind, window = entries["model_type"], entries.get("sliding_window")
    if kind == "phi3":
        return {"attention.sliding_window": window or 0}
    if not window or kind not in ("mistral", "mixtral", *_USUAL_PERIODS):
        return {}
    found: Metadata = {"attention.sliding_window": window}
    if (period := _USUAL_PERIODS.get(kind)) is not None:
        usual = [(index + 1) % period != 0 for index in range(num_layers(entries))]
        given = entries.get("layer_types")
        slides = usual if given is None else [each == "sliding_attention" for each in given]
        if slides != usual or kind == "olmo3":
            found["attention.sliding_window_pattern"] = slides
    return found


def _rope(entries: Entries) -> Metadata:
    rope = rope_of(entries)
    share = rope.get("partial_rotary_factor") or entries.get("partial_rotary_factor") or 1.0
    rotated = entries.get("qk_rope_head_dim") or int(head_dim(entries) * share)
    found: Metadata = {"rope.freq_base": rope["rope_theta"], "rope.dimension_count": rotated}
    if entries["model_type"] == "gemma3_text":
        given = entries.get("rope_parameters") or {}
        local = (given.get("sliding_attention") or {}).get("rope_theta") or entries.get("rope_local_base_freq")
        found["rope.freq_base_swa"] = float(local or 10000.0)
    kind = rope["rope_type"]
    if long_factors(entries) is not None:
        return found | _long_rope(entries, rope)
    if kind == "default" or frequency_factors(entries) is not None:
        return found
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"rope_type {kind!r} cannot be said in a GGUF file")
    factor = float(rope["factor"])
    found |= {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if original := rope.get("original_max_position_embeddings"):
        found["rope.scaling.original_context_length"] = original
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name) is not None:
            found[f"rope.scaling.yarn_{name}"] = float(rope[name])
    if "kv_lora_rank" in entries:
        return found | _sharpness(rope)
    if kind == "yarn" and rope.get("attention_factor") is not None:
        found["rope.scaling.attn_factor"] = float(rope["attention_factor"]) / (0.1 * math.log(factor) + 1.0)
    return found


def _sharpness(rope: Entries) -> Metadata:
    """Of latent attention, which stretched rotations sharpen and do not lengthen."""
    mscale, sharpened = (rope.get(name) for name in ("mscale", "mscale_all_dim"))
    if rope["rope_type"] != "yarn" or mscale != sharpened or rope.get("attention_factor") is not None:
        raise UnsupportedError(
            f"{rope['rope_type']} with mscale {mscale} and mscale_all_dim {sharpened} cannot be said in a GGUF file: "
            "expected yarn with one number for both"
        )
    return {"rope.scaling.yarn_log_multiplier": 0.1 * float(sharpened)} if sharpened else {}


def _long_rope(entries: Entries, rope: Entries) -> Metadata:
    original = rope.get("original_max_position_embeddings") or entries["original_max_position_embeddings"]
    longer = entries["max_position_embeddings"] / original
    usual = math.sqrt(1.0 + math.log(longer) / math.log(original)) if longer > 1.0 else 1.0
    magnitude = rope.get("attention_factor")
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": usual if magnitude is None else float(magnitude),
    }


def _templates(checkpoint: Checkpoint) -> Metadata:
    key = "tokenizer.chat_template"
    return {key if name == "default" else f"{key}.{name}": text for name, text in checkpoint.chat_templates.items()}


# ---- The tokenizer -----------------------------------------------------------------------------------------------


def _tokenizer(checkpoint: Checkpoint, entries: Entries) -> Metadata:
    """In llama.cpp's fields, and as it is, which our reader prefers: how texts are split is known for some alone."""
    files = checkpoint.tokenizer
    document = orjson.loads(files.document)
    model = document["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(f"{files.path} is a {model['type']} tokenizer: only BPE ones are written to GGUF")
    added = {token["content"]: token for token in document.get("added_tokens") or ()}
    ids = {**model["vocab"], **{content: token["id"] for content, token in added.items()}}
    tokens = [f"[PAD{number}]" for number in range(max(entries["vocab_size"], max(ids.values()) + 1))]
    kinds = [int(TokenKind.UNUSED)] * len(tokens)
    for token, token_id in ids.items():
        tokens[token_id] = token
        kinds[token_id] = _kind(token, added.get(token), model)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    is_byte_level = any(part.get("type") == "ByteLevel" for part in _parts(document.get("pre_tokenizer")))
    found: Metadata = {f"{PREFIX}tokens": tokens, f"{PREFIX}token_type": kinds}
    if is_byte_level:
        found |= {f"{PREFIX}model": "gpt2", f"{PREFIX}pre": _pre(document), f"{PREFIX}merges": merges}
    else:
        found |= {f"{PREFIX}model": "llama", f"{PREFIX}scores": _scores(tokens, merges)}
        found[f"{PREFIX}add_space_prefix"] = _begins_with_space(document)
    return found | _named(checkpoint, document, ids, model) | {"tokenizer.huggingface.json": files.document}


def _kind(token: str, added: Mapping[str, Any] | None, model: Mapping[str, Any]) -> int:
    if token == model.get("unk_token") and model.get("byte_fallback"):
        return TokenKind.UNKNOWN
    if added is not None:
        return TokenKind.CONTROL if added.get("special") else TokenKind.USER_DEFINED
    is_byte = bool(model.get("byte_fallback")) and len(token) == 6 and token.startswith("<0x")
    return TokenKind.BYTE if is_byte else TokenKind.NORMAL


def _parts(described: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """A step of a tokenizer, or those of a sequence of steps."""
    if described is None:
        return ()
    for name in ("pretokenizers", "normalizers", "processors"):
        if name in described:
            return tuple(described[name])
    return (described,)


def _pre(document: Mapping[str, Any]) -> str:
    """llama.cpp's name for how texts are split; "default" for a way that has none."""
    patterns = []
    for part in _parts(document.get("pre_tokenizer")):
        if part["type"] == "Split":
            patterns.append(part["pattern"].get("Regex", ""))
        elif part["type"] == "Digits" and part.get("individual_digits"):
            patterns.append(_DIGIT)
        elif part["type"] == "ByteLevel" and part.get("use_regex", True):
            patterns.append(GPT2_PATTERN)
    return next((names[0] for names, known in PATTERNS.items() if list(known) == patterns), "default")


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """The higher, the sooner a pair becomes the token."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _begins_with_space(document: Mapping[str, Any]) -> bool:
    steps = (*_parts(document.get("normalizer")), *_parts(document.get("pre_tokenizer")))
    return any(
        part.get("prepend") == SPACE
        or part.get("prepend_scheme") in ("always", "first")
        or part.get("add_prefix_space")
        for part in steps
    )


def _named(
    checkpoint: Checkpoint, document: Mapping[str, Any], ids: Mapping[str, int], model: Mapping[str, Any]
) -> Metadata:
    """The tokens that have a name, and whether texts begin or end with one."""
    config = checkpoint.entries("tokenizer_config.json")
    found: Metadata = {}
    for name, key in NAMED_TOKENS.items():
        token = config.get(name) or (model.get("unk_token") if name == "unk_token" else None)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str) and token in ids:
            found[PREFIX + key] = ids[token]
    ends = sorted(checkpoint.eos_token_ids)
    if ends:
        found.setdefault(f"{PREFIX}eos_token_id", ends[0])
    others = [token_id for token_id in ends if token_id != found[f"{PREFIX}eos_token_id"]]
    if others:
        found[f"{PREFIX}eot_token_id"] = others[0]
    around = [part["single"] for part in _parts(document.get("post_processor")) if "single" in part]
    found[f"{PREFIX}add_bos_token"] = any("SpecialToken" in single[0] for single in around)
    found[f"{PREFIX}add_eos_token"] = any("SpecialToken" in single[-1] for single in around)
    if found[f"{PREFIX}add_bos_token"] and f"{PREFIX}bos_token_id" not in found:
        raise InvalidArgumentError(f"{checkpoint.place} begins texts with a token that its config does not name")
    return found
