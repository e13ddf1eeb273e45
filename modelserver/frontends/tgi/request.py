"""The body of a generation: `inputs` and `parameters`, checked in TGI's words."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.pictures import IMAGE, MARK, Picture

MAX_BEST_OF = 16
MAX_STOPS = 64
MAX_TOP_TOKENS = 20
# Of a request that does not say it.
_DEFAULT_MAX_TOKENS = 100
_ANY = Range(-math.inf, math.inf)
_ANY_INTEGER = Range(-(2**63), 2**64 - 1)
# A picture in a prompt, as Markdown has it: a URL, or a data: URL.
_PICTURE = re.compile(r"!\[\]\(([^)]+)\)")
_GRAMMARS = ("json", "regex", "json_schema")
_REFUSED = {
    "watermark": "models here do not mark their texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiRequest:
    """What a client asks for.

    `sampling` has vLLM's names. `seed` is told in details: the client's, or one drawn here for a text that is sampled;
    None where there is nothing to tell. `num_top` alternatives of each token are told. `truncate`: how many of the last
    tokens of the prompt are read. `prompt` is `inputs` with marks in the place of `pictures`.
    """

    inputs: str
    prompt: str
    pictures: tuple[Picture, ...]
    sampling: dict[str, Any]
    has_full_text: bool
    has_details: bool
    has_prefill: bool
    num_top: int
    best_of: int
    seed: int | None
    truncate: int | None
    adds_special_tokens: bool


def read_request(fields: Fields, model: LanguageModel, *, is_streamed: bool, has_full_text: bool = False) -> TgiRequest:
    """`has_full_text` is for a body that does not say it. Raises ParameterError for the first thing that is wrong."""
    fields.need("inputs", "a string")
    inputs = fields.text("inputs") or ""
    given = fields.fields("parameters") or Fields({}, "parameters")
    _refuse(given)
    best_of = _read_best_of(given, is_streamed=is_streamed)
    has_prefill = given.flag("decoder_input_details")
    if has_prefill and is_streamed:
        raise _wrong(given, "decoder_input_details", "== true is not supported when streaming tokens")
    num_top = given.integer("top_n_tokens", _ANY_INTEGER) or 0
    if not 0 <= num_top <= MAX_TOP_TOKENS:
        raise _wrong(given, "top_n_tokens", f"must be >= 0 and <= {MAX_TOP_TOKENS}. Given: {num_top}")
    sampling, seed = _read_sampling(given, model, best_of)
    if adapter := given.text("adapter_id"):
        if not model.adapts:
            raise ParameterError(
                f"`adapter_id` is not supported: model '{model.name}' takes no adapters",
                given.path("adapter_id"),
                Fault.UNSUPPORTED_PARAMETER,
            )
        sampling["lora_name"] = adapter
    if not inputs:
        raise _wrong(fields, "inputs", "cannot be empty")
    truncate = _read_truncate(given, model)
    prompt = inputs
    pictures: tuple[Picture, ...] = ()
    if IMAGE in model.inputs and (sources := _PICTURE.findall(inputs)):
        prompt, pictures = _PICTURE.sub(MARK, inputs), tuple(Picture(source, "inputs") for source in sources)
        if has_prefill or truncate is not None:
            name = "truncate" if truncate is not None else "decoder_input_details"
            raise _wrong(given, name, "is not supported for a prompt with pictures")
    return TgiRequest(
        inputs=inputs,
        prompt=prompt,
        pictures=pictures,
        sampling=sampling,
        has_full_text=given.flag("return_full_text", has_full_text),
        has_details=given.flag("details") or has_prefill,
        has_prefill=has_prefill,
        num_top=num_top,
        best_of=best_of,
        seed=seed,
        truncate=truncate,
        adds_special_tokens=fields.flag("add_special_tokens", True),
    )


def _read_sampling(given: Fields, model: LanguageModel, best_of: int) -> tuple[dict[str, Any], int | None]:
    """The sampling parameters, and the seed to tell."""
    temperature = _read_positive(given, "temperature")
    found: dict[str, Any] = {
        "temperature": temperature,
        "repetition_penalty": _read_positive(given, "repetition_penalty"),
        "frequency_penalty": _read_between(given, "frequency_penalty", -2.0, 2.0),
        "top_k": given.integer("top_k", _ANY_INTEGER),
        "top_p": _read_share(given, "top_p"),
        "typical_p": _read_share(given, "typical_p"),
    }
    if found["top_k"] is not None and found["top_k"] <= 0:
        raise _wrong(given, "top_k", "must be strictly positive")
    is_sampled = given.flag("do_sample") or any(
        found[name] is not None for name in ("temperature", "top_k", "top_p", "typical_p")
    )
    if best_of > 1 and not is_sampled:
        raise ParameterError("you must use sampling when `best_of` is > 1", given.path("best_of"))
    has_object = "sampling_parameters" in model.inputs
    if not is_sampled and has_object:
        # Without a wish for chance TGI takes the most probable token, whatever the model's own default is.
        found["temperature"] = 0.0
    seed = given.integer("seed", _ANY_INTEGER)
    if seed is not None and seed < 0:
        raise _wrong(given, "seed", "must be positive")
    if seed is not None and best_of > 1:
        raise _wrong(given, "seed", "must not be set when `best_of` > 1")
    if seed is None and is_sampled and has_object and best_of == 1:
        seed = secrets.randbelow(MAX_INT64)
    if seed is not None:
        # Models have signed seeds; those beyond are the negative ones.
        found["seed"] = seed if seed <= MAX_INT64 else seed - 2**64
    num_tokens = given.integer("max_new_tokens", _ANY_INTEGER)
    if num_tokens is not None and num_tokens <= 0:
        raise _wrong(given, "max_new_tokens", "must be strictly positive")
    found["max_tokens"] = _DEFAULT_MAX_TOKENS if num_tokens is None else num_tokens
    stops = given.items("stop", 1 << 16) or []
    if len(stops) > MAX_STOPS:
        raise _wrong(given, "stop", f"supports up to {MAX_STOPS} stop sequences. Given: {len(stops)}")
    found["stop"] = [each for each in given.texts("stop", MAX_STOPS) or () if each] or None
    if found["stop"] and has_object:
        found["include_stop_str_in_output"] = True
    found["structured_outputs"] = _read_grammar(given)
    return {name: value for name, value in found.items() if value is not None}, seed if is_sampled else None


def _read_best_of(given: Fields, *, is_streamed: bool) -> int:
    best_of = given.integer("best_of", _ANY_INTEGER)
    if best_of is None:
        return 1
    if not 0 < best_of <= MAX_BEST_OF:
        raise _wrong(given, "best_of", f"must be > 0 and <= {MAX_BEST_OF}. Given: {best_of}")
    if best_of > 1 and is_streamed:
        raise _wrong(given, "best_of", "!= 1 is not supported when streaming tokens")
    return best_of


def _read_truncate(given: Fields, model: LanguageModel) -> int | None:
    truncate = given.integer("truncate", _ANY_INTEGER)
    if truncate is None:
        return None
    if truncate <= 0:
        raise _wrong(given, "truncate", f"must be strictly positive. Given: {truncate}")
    if not {"operation", "input_ids"} <= model.inputs.keys():
        raise _wrong(given, "truncate", f"is not supported: model '{model.name}' takes texts and no tokens")
    return truncate


def _read_grammar(given: Fields) -> dict[str, Any] | None:
    grammar = given.fields("grammar")
    if grammar is None:
        return None
    grammar.need("type", f"one of {', '.join(_GRAMMARS)}")
    kind = grammar.word("type", _GRAMMARS)
    grammar.need("value", "the schema or the regular expression")
    value = grammar.document["value"]
    if kind == "regex":
        return {"regex": grammar.text("value")}
    if kind == "json_schema":
        described = grammar.fields("value")
        assert described is not None, "it is there"
        described.need("schema", "a JSON schema")
        value = described.document["schema"]
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise ParameterError(f"grammar is not valid: {error}", grammar.path("value")) from None
    if not isinstance(value, dict):
        raise ParameterError("grammar is not valid: a JSON schema is an object", grammar.path("value"))
    return {"json": value}


def _refuse(given: Fields) -> None:
    for name, why in _REFUSED.items():
        value = given.document.get(name)
        if value is not None and value is not False:
            raise ParameterError(f"`{name}` is not supported: {why}", given.path(name), Fault.UNSUPPORTED_PARAMETER)


def _read_positive(given: Fields, name: str) -> float | None:
    value = given.number(name, _ANY)
    if value is not None and value <= 0:
        raise _wrong(given, name, "must be strictly positive")
    return value


def _read_between(given: Fields, name: str, low: float, high: float) -> float | None:
    value = given.number(name, _ANY)
    if value is not None and not low <= value <= high:
        raise _wrong(given, name, f"must be >= {low} and <= {high}")
    return value


def _read_share(given: Fields, name: str) -> float | None:
    value = given.number(name, _ANY)
    if value is not None and not 0 < value < 1:
        raise _wrong(given, name, "must be > 0.0 and < 1.0")
    return value


def _wrong(fields: Fields, name: str, why: str) -> ParameterError:
    """The error in TGI's words, which its clients know."""
    return ParameterError(f"`{name}` {why}", fields.path(name), Fault.INVALID_VALUE)
