"""Sampling parameters of a request -> the object that a language model takes as `sampling_parameters`.

Only what the client says is passed on: everything else is the model's to decide. Names are vLLM's throughout.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.openai.limits import MAX_CHOICES, MAX_STOPS, MAX_TOKEN_IDS

VERBOSITIES = ("low", "medium", "high")
TOKEN_ID = Range(0, 2**31 - 1)

NUMBERS: dict[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, is_open=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, MAX_INT64, is_open=True),
    # llama.cpp's, whose ranges are the model's.
    "typical_p": Range(0, 1, is_open=True),
    "top_n_sigma": Range(-1, MAX_INT64),
    "xtc_probability": Range(0, 1),
    "xtc_threshold": Range(0, 1),
    "dynatemp_range": Range(0, MAX_INT64),
    "dynatemp_exponent": Range(0, MAX_INT64),
    "dry_multiplier": Range(0, MAX_INT64),
    "dry_base": Range(1, MAX_INT64),
    "mirostat_tau": Range(0, MAX_INT64),
    "mirostat_eta": Range(0, 1),
}
INTEGERS: dict[str, Range] = {
    "top_k": Range(-1, MAX_INT64),
    "seed": Range(-(2**63), MAX_INT64),
    "min_tokens": Range(0, MAX_INT64),
    "priority": Range(-(2**31), 2**31 - 1),
    "mirostat": Range(0, 2),
    "dry_allowed_length": Range(1, MAX_INT64),
    "dry_penalty_last_n": Range(-1, MAX_INT64),
}
# The samplers that only some models have, with the values that ask for nothing: those reach no model.
_NEUTRAL = {"mirostat": 0, "typical_p": 1, "xtc_probability": 0, "dry_multiplier": 0, "dynatemp_range": 0}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_BIAS = Range(-100, 100)

# What the field's other servers know and this one does not do: refused, unless the value asks for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "watermarking": (),
    "lora_name": (),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
# Names that other servers have for parameters of this API.
_OTHER_NAMES: dict[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
}
# What says nothing about the answer; it must be of its type all the same. Only chats have a prediction.
_TEXTS_WITHOUT_EFFECT = (
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_OBJECTS_WITHOUT_EFFECT = ("metadata", "prediction", "prompt_cache_options")
_FLAGS_WITHOUT_EFFECT = ("store", "spaces_between_special_tokens")


def refuse_unsupported(fields: Fields, *, offered: Collection[str] = ()) -> None:
    """Raise ParameterError for a parameter that would change the answer and that has no effect here, but for those
    that this call has; and for one without effect that is not of its type."""
    for name, neutral in _REFUSED.items():
        value = fields.document.get(name)
        if value is not None and value not in neutral and name not in offered:
            raise unsupported(fields, name, "this server does not offer it")
    for name, ours in _OTHER_NAMES.items():
        if fields.has(name):
            raise unsupported(fields, name, f"say '{ours}', as OpenAI's and vLLM's clients do")
    for name in _TEXTS_WITHOUT_EFFECT:
        fields.text(name)
    for name in _FLAGS_WITHOUT_EFFECT:
        fields.flag(name)
    for name in _OBJECTS_WITHOUT_EFFECT:
        fields.mapping(name)


def unsupported(fields: Fields, name: str, why: str) -> ParameterError:
    """The error for a parameter that is known and not offered."""
    return ParameterError(
        f"'{fields.path(name)}' is not supported: {why}", fields.path(name), Fault.UNSUPPORTED_PARAMETER
    )


def read_sampling(fields: Fields) -> dict[str, Any]:
    """The parameters that completions and chat share, but for n, lengths, log-probabilities and structure.

    Raises ParameterError.
    """
    refuse_unsupported(fields, offered=("lora_name",))
    found: dict[str, Any] = {"lora_name": fields.text("lora_name")}
    for name, bounds in NUMBERS.items():
        found[name] = fields.number(name, bounds)
    for name, bounds in INTEGERS.items():
        found[name] = fields.integer(name, bounds)
    for name in FLAGS:
        found[name] = fields.flag(name) if fields.has(name) else None
    for name, neutral in _NEUTRAL.items():
        if found[name] == neutral:
            del found[name]
    if (found["top_n_sigma"] or 0) <= 0:
        del found["top_n_sigma"]
    found["dry_sequence_breakers"] = fields.texts("dry_sequence_breakers", MAX_STOPS)
    found["stop"] = _read_stop(fields)
    found["stop_token_ids"] = fields.integers("stop_token_ids", MAX_TOKEN_IDS, TOKEN_ID)
    found["allowed_token_ids"] = fields.integers("allowed_token_ids", MAX_TOKEN_IDS, TOKEN_ID)
    found["bad_words"] = fields.texts("bad_words", MAX_STOPS * 16)
    found["logit_bias"] = _read_bias(fields)
    found["cache_salt"] = fields.text("cache_salt")
    return {name: value for name, value in found.items() if value is not None}


def read_choices(fields: Fields) -> int:
    """`n`: how many continuations of each prompt."""
    return fields.integer("n", Range(1, MAX_CHOICES)) or 1


def _read_stop(fields: Fields) -> list[str] | None:
    value = fields.document.get("stop")
    if isinstance(value, str):
        if not value:
            raise fields.wrong("stop", "a string that is not empty", value)
        return [value]
    if value is not None and not isinstance(value, list):
        raise fields.wrong("stop", "a string or an array of strings", value)
    stops = fields.texts("stop", MAX_STOPS) or []
    for index, stop in enumerate(stops):
        if not stop:
            raise fields.wrong(f"stop[{index}]", "a string that is not empty", stop)
    return stops or None


def _read_bias(fields: Fields) -> dict[str, float] | None:
    bias = fields.mapping("logit_bias")
    if not bias:
        return None
    if len(bias) > MAX_TOKEN_IDS:
        raise fields.wrong("logit_bias", f"an object of at most {MAX_TOKEN_IDS} members", len(bias))
    for token_id in bias:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 11):
            raise fields.wrong("logit_bias", "an object whose keys are token ids", token_id)
        Fields(bias, fields.path("logit_bias")).number(token_id, _BIAS)
    return {token_id: value for token_id, value in bias.items() if value is not None}
