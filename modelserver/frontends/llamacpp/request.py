"""The body of a completion: prompts, samplers and the form of the answer, checked.

Only what a request says is passed on; the rest is the model's own default, as with every API here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelserver.frontends.llm.call import Prompt
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.llm.pictures import Picture

MAX_PROMPTS = 2048
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_PROBS = 20
MAX_PICTURES = 128
MAX_TOKENS = 1 << 20
TOKEN_ID = Range(0, 2**31 - 1)
_ANY = Range(-math.inf, math.inf)
_INT32 = Range(-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """A text with a mark in the place of each picture."""

    text: str
    pictures: tuple[Picture, ...]


# A prompt as it was sent: one of both that models take, texts and token ids that follow one another, or with pictures.
MixedPrompt = Prompt | list[int | str] | SeenPrompt

# llama.cpp's name of a sampler's parameter -> the model's, for those whose values mean the same.
NUMBERS: dict[str, str] = {
    "temperature": "temperature",
    "dynatemp_range": "dynatemp_range",
    "dynatemp_exponent": "dynatemp_exponent",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "top_n_sigma": "top_n_sigma",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
INTEGERS: dict[str, str] = {
    "top_k": "top_k",
    "mirostat": "mirostat",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n",
    "seed": "seed",
}
# What says how llama.cpp's server runs a request, and nothing about the text; it must be of its type all the same.
INTEGERS_WITHOUT_EFFECT = ("n_keep", "n_discard", "id_slot", "repeat_last_n", "n_cache_reuse")
_FLAGS_WITHOUT_EFFECT = ("cache_prompt", "return_progress")
# What would change the answer, with the values that ask for nothing, and why it is not served.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "samplers": (([],), "the order of samplers is fixed here: leave it out"),
    "min_keep": ((0, 1), "samplers keep at least one token here, and no other number"),
    "n_indent": ((0,), "texts are not checked for their indents"),
    "t_max_predict_ms": ((0, -1), "a text ends by its tokens: say n_predict"),
    "post_sampling_probs": ((False,), "probabilities are those of the model, before samplers"),
    "control_vectors": (([],), "control vectors are not served"),
    "grammar_lazy": ((False,), "a grammar holds from the first token"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What a client asks for. `sampling` has vLLM's names; `settings` are what the client said, to be told back.

    `num_predict` 0: the prompt is read, and no text is told. `is_array`: the answer is an array, as several were asked
    for. `fields` are those that the answer keeps; none: all.
    """

    prompts: list[MixedPrompt]
    sampling: dict[str, Any]
    settings: dict[str, Any]
    num_predict: int | None
    num_choices: int
    num_probs: int
    has_tokens: bool
    has_timings: bool
    is_streamed: bool
    is_array: bool
    fields: tuple[str, ...]


def read_scales(value: Any, names: Sequence[str]) -> dict[str, float] | None:
    """How much of which adapter: an array of {id, scale}, whose ids are places in `names`; None if nothing is said.

    Raises ParameterError.
    """
    if value is None:
        return None
    found: dict[str, float] = {}
    for entry in value if isinstance(value, list) else [value]:
        number, scale = (entry.get("id"), entry.get("scale")) if isinstance(entry, dict) else (None, None)
        if type(number) is not int or isinstance(scale, bool) or not isinstance(scale, int | float):
            raise ParameterError(
                "'lora' must be an array of objects with an integer id and a number scale", "lora", Fault.INVALID_VALUE
            )
        if not 0 <= number < len(names):
            raise ParameterError(
                f"'lora' has the id {number}, and the model has {len(names)} adapters: GET /lora-adapters lists them",
                "lora",
                Fault.INVALID_VALUE,
            )
        found[names[number]] = float(scale)
    return {name: scale for name, scale in found.items() if scale}


def read_request(fields: Fields, prompts: list[MixedPrompt], *, is_array: bool) -> CompletionRequest:
    """Raises ParameterError for the first thing that is wrong. A bias by texts is for `read_bias`."""
    _refuse(fields)
    sampling = _read_samplers(fields)
    num_predict = fields.integer("n_predict", _INT32)
    if num_predict is None:
        num_predict = fields.integer("max_tokens", _INT32)
    sampling["max_tokens"] = None if num_predict is None or num_predict < 0 else max(1, num_predict)
    num_choices = fields.integer("n_cmpl", Range(1, MAX_CHOICES)) or fields.integer("n", Range(1, MAX_CHOICES)) or 1
    if num_choices > 1:
        sampling["n"] = num_choices
    num_probs = fields.integer("n_probs", Range(0, MAX_PROBS)) or 0
    if num_probs:
        sampling["logprobs"] = num_probs
    stops = [each for each in fields.texts("stop", MAX_STOPS) or () if each]
    if stops:
        sampling["stop"] = stops
    if fields.has("ignore_eos"):
        sampling["ignore_eos"] = fields.flag("ignore_eos")
    structure = _read_structure(fields)
    if structure is not None:
        sampling["structured_outputs"] = structure
    is_told = NUMBERS.keys() | INTEGERS.keys() | {"n_predict", "stop", "n_probs", "grammar", "ignore_eos", "stream"}
    return CompletionRequest(
        prompts=prompts,
        sampling=sampling,
        settings={name: value for name, value in fields.document.items() if name in is_told},
        num_predict=num_predict,
        num_choices=num_choices,
        num_probs=num_probs,
        has_tokens=fields.flag("return_tokens"),
        has_timings=fields.flag("timings_per_token"),
        is_streamed=fields.flag("stream"),
        is_array=is_array or num_choices > 1,
        fields=tuple(fields.texts("response_fields", 256) or ()),
    )


def _read_samplers(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, ours in NUMBERS.items():
        value = fields.number(name, _ANY)
        if value is not None:
            found[ours] = value
    for name, ours in INTEGERS.items():
        value = fields.integer(name, Range(-(2**63), MAX_INT64))
        if value is not None:
            found[ours] = value
    breakers = fields.texts("dry_sequence_breakers", 64)
    if breakers is not None:
        found["dry_sequence_breakers"] = breakers
    # Values by which llama.cpp's server says "off" or "any".
    for name, is_off in _OFF.items():
        if name in found and is_off(found[name]):
            del found[name]
    if found.get("temperature", 1) < 0:
        found["temperature"] = 0.0
    if found.get("top_k", 1) <= 0:
        found["top_k"] = -1
    if fields.integer("repeat_last_n", _INT32) == 0:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            found.pop(name, None)
    return found


_OFF: Mapping[str, Callable[[Any], bool]] = {
    "seed": lambda seed: seed < 0 or seed == 2**32 - 1,
    "top_n_sigma": lambda sigma: sigma <= 0,
    "xtc_probability": lambda probability: probability <= 0,
    "dry_multiplier": lambda multiplier: multiplier <= 0,
    "dynatemp_range": lambda width: width <= 0,
    "typical_p": lambda share: share >= 1,
    "top_p": lambda share: share >= 1,
    "min_p": lambda share: share <= 0,
    "mirostat": lambda version: version == 0,
}


def _refuse(fields: Fields) -> None:
    for name in INTEGERS_WITHOUT_EFFECT:
        fields.integer(name, _INT32)
    for name in _FLAGS_WITHOUT_EFFECT:
        fields.flag(name)
    for name, (neutral, why) in _REFUSED.items():
        value = fields.document.get(name)
        if value is not None and value not in neutral:
            raise ParameterError(
                f"'{fields.path(name)}' is not supported: {why}", fields.path(name), Fault.UNSUPPORTED_PARAMETER
            )


def _read_structure(fields: Fields) -> dict[str, Any] | None:
    grammar = fields.text("grammar")
    schema = fields.document.get("json_schema")
    if grammar and schema is not None:
        raise ParameterError('Either "json_schema" or "grammar" can be specified, but not both', "grammar")
    if grammar:
        return {"grammar": grammar}
    if schema is None:
        return None
    if not isinstance(schema, dict) and schema is not True:
        raise fields.wrong("json_schema", "a JSON schema, which is an object", schema)
    return {"json": schema}


def read_bias(fields: Fields) -> list[tuple[int | str, float]]:
    """`logit_bias`: tokens, by id or by their text, with what is added. `false` forbids a token. ParameterError."""
    value = fields.document.get("logit_bias")
    if not value:
        return []
    pairs = list(value.items()) if isinstance(value, dict) else value
    expected = "an array of [token id or text, number or false], or an object"
    if not isinstance(pairs, list) or len(pairs) > MAX_TOKENS:
        raise fields.wrong("logit_bias", expected, value)
    found: list[tuple[int | str, float]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[0]) not in (int, str):
            raise fields.wrong("logit_bias", expected, pair)
        token, bias = pair
        if bias is False:
            bias = -math.inf
        if type(bias) not in (int, float):
            raise fields.wrong("logit_bias", expected, pair)
        if isinstance(token, str) and token.isascii() and token.isdigit() and isinstance(value, dict):
            token = int(token)
        found.append((token, max(-100.0, min(100.0, float(bias)))))
    return found


def read_prompts(fields: Fields, name: str) -> tuple[list[MixedPrompt], bool]:
    """The prompts, and whether they came as an array. Raises ParameterError.

    A prompt is a text, token ids, an array of both, or `{"prompt_string": text, "multimodal_data": [base64]}`; several
    are an array of those.
    """
    expected = "a text, token ids, an array of both, or an array of those"
    fields.need(name, expected)
    value = fields.document[name]
    if not isinstance(value, list):
        return [_read_prompt(fields, name, value)], False
    if not value:
        raise fields.wrong(name, "an array that is not empty", value)
    if any(type(item) is int for item in value):
        return [_read_prompt(fields, name, value)], False
    items = fields.items(name, MAX_PROMPTS) or []
    return [_read_prompt(fields, f"{name}[{index}]", item) for index, item in enumerate(items)], True


def _read_prompt(fields: Fields, name: str, value: Any) -> MixedPrompt:
    if isinstance(value, dict):
        prompt = Fields(value, fields.path(name))
        prompt.need("prompt_string", "a string")
        text = prompt.text("prompt_string") or ""
        data = prompt.texts("multimodal_data", MAX_PICTURES) or ()
        param = prompt.path("multimodal_data")
        pictures = tuple(Picture(each, f"{param}[{index}]") for index, each in enumerate(data))
        return SeenPrompt(text, pictures) if pictures else text
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or len(value) > MAX_TOKENS:
        raise fields.wrong(name, "a text, or an array of token ids and texts", value)
    for item in value:
        if not isinstance(item, str) and (type(item) is not int or not TOKEN_ID.holds(item)):
            raise fields.wrong(name, "an array of token ids and texts", item)
    return value
