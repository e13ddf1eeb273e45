"""How the tokens of one request are to be chosen, and when to stop: vLLM's names, ranges and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .json_fields import boolean, decoded, integer, number, strings, token_ids, unknown, wrong
from .structured_outputs import ALIASES, check_structured_outputs, from_aliases

MAX_N = 128
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
# Beyond these the float32 that they become, or the logits that they scale, would be infinite or 0.
MAX_TEMPERATURE = 1_000_000
MIN_REPETITION, MAX_REPETITION = 0.001, 1000
# Of llama.cpp's samplers: beyond these they do what they do at them.
MAX_SIGMA, MAX_EXPONENT, MAX_TAU = 1000, 100, 100
MAX_BREAKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked once, by `from_json` or when made. Nothing here depends on the model but `max_tokens`'s upper bound.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1, `typical_p` 1 and `min_p` 0 do nothing; neither do penalties
    of 0 (`repetition_penalty` of 1), nor llama.cpp's samplers with `mirostat`, `top_n_sigma`, `xtc_probability`,
    `dry_multiplier` or `dynatemp_range` of 0. `max_tokens` None: as many as the model's length allows. `logprobs`: how
    many alternatives to report with each token besides itself; `prompt_logprobs` the same for the prompt's tokens.

    Raises InvalidArgumentError, which names the parameter, when one is out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    # What the text must be: {"json": schema} | {"json_object": true} | {"regex": "..."} | {"choice": [...]} |
    # {"grammar": "..."}; compiled by `grammar/`.
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, convert in CONVERTERS.items():
            value = getattr(self, name)
            # A default needs no look, and most parameters have theirs.
            if value is not _DEFAULTS[name]:
                object.__setattr__(self, name, None if value is None and name in NULLABLE else convert(name, value))
        for name, (is_right, expected) in _RANGES.items():
            value = getattr(self, name)
            if value is not _DEFAULTS[name] and value is not None and not is_right(value):
                raise wrong(name, expected, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From a JSON object, or request parameters whose values may be strings. null is as good as absent, but for
        parameters whose default null is not (`max_tokens`). vLLM's older names of structured outputs are known.

        Raises InvalidArgumentError for a name that is none, and for a value of a wrong type or out of its range.
        """
        given = {name: value for name, value in values.items() if not _is_neutral(name, value)}
        structured = from_aliases(given)
        for name in given:
            if name not in CONVERTERS:
                raise unknown(name, CONVERTERS.keys() | ALIASES)
        given = {name: value for name, value in given.items() if value is not None or name in NULLABLE}
        if structured is not None:
            given["structured_outputs"] = structured
        return cls(**given)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5


def _is_neutral(name: str, value: Any) -> bool:
    """Whether this is a parameter of vLLM that may be left out. Raises InvalidArgumentError if it asks for
    something.
    """
    if name not in NEUTRAL:
        return False
    neutral = NEUTRAL[name]
    convert = boolean if isinstance(neutral, bool) else number
    if value is not None and convert(name, value) != neutral:
        raise wrong(name, f"{str(neutral).lower()} or absent, because this server does not support it", value)
    return True


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    """Token ids (JSON has them as strings) to what is added to their logits."""
    biases = decoded(name, value) if isinstance(value, str) else value
    if not isinstance(biases, Mapping):
        raise wrong(name, "an object of token ids and numbers", value)
    bias = {integer(name, token): number(name, amount) for token, amount in biases.items()}
    for token, amount in bias.items():
        if token < 0 or not -100 <= amount <= 100:
            raise wrong(name, "an object of token ids and numbers from -100 to 100", {str(token): amount})
    return bias


CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "n": integer,
    "temperature": number,
    "top_k": integer,
    "top_p": number,
    "min_p": number,
    "typical_p": number,
    "top_n_sigma": number,
    "dynatemp_range": number,
    "dynatemp_exponent": number,
    "xtc_probability": number,
    "xtc_threshold": number,
    "mirostat": integer,
    "mirostat_tau": number,
    "mirostat_eta": number,
    "dry_multiplier": number,
    "dry_base": number,
    "dry_allowed_length": integer,
    "dry_penalty_last_n": integer,
    "dry_sequence_breakers": strings,
    "repetition_penalty": number,
    "frequency_penalty": number,
    "presence_penalty": number,
    "logit_bias": _logit_bias,
    "allowed_token_ids": token_ids,
    "bad_words": strings,
    "seed": integer,
    "max_tokens": integer,
    "min_tokens": integer,
    "stop": strings,
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "logprobs": integer,
    "prompt_logprobs": integer,
    "skip_special_tokens": boolean,
    "structured_outputs": check_structured_outputs,
}
# vLLM's parameters that are not supported, and the value with which each asks for nothing.
NEUTRAL: dict[str, bool | int] = {
    "best_of": 1,
    "detokenize": True,
    "early_stopping": False,
    "length_penalty": 1,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": -1,
    "use_beam_search": False,
}
NULLABLE = frozenset({"allowed_token_ids", "seed", "max_tokens", "logprobs", "prompt_logprobs", "structured_outputs"})
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda value: 1 <= value <= MAX_N, f"from 1 to {MAX_N}"),
    "temperature": (lambda value: 0 <= value <= MAX_TEMPERATURE, f"from 0 to {MAX_TEMPERATURE}"),
    "top_k": (lambda value: -1 <= value <= MAX_TOP_K, f"from 1 to {MAX_TOP_K}, or 0 or -1 for all tokens"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "typical_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_n_sigma": (lambda value: value <= MAX_SIGMA, f"at most {MAX_SIGMA}, and above 0 to have an effect"),
    "dynatemp_range": (lambda value: 0 <= value <= MAX_TEMPERATURE, f"from 0 to {MAX_TEMPERATURE}"),
    "dynatemp_exponent": (lambda value: 0 <= value <= MAX_EXPONENT, f"from 0 to {MAX_EXPONENT}"),
    "xtc_probability": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "xtc_threshold": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "mirostat": (lambda value: value in (0, 1, 2), "0, 1 or 2"),
    "mirostat_tau": (lambda value: 0 <= value <= MAX_TAU, f"from 0 to {MAX_TAU}"),
    "mirostat_eta": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "dry_multiplier": (lambda value: 0 <= value <= MAX_TEMPERATURE, f"from 0 to {MAX_TEMPERATURE}"),
    "dry_base": (lambda value: 1 <= value <= MAX_EXPONENT, f"from 1 to {MAX_EXPONENT}"),
    "dry_allowed_length": (lambda value: 1 <= value <= MAX_TOP_K, "at least 1"),
    "dry_penalty_last_n": (lambda value: -1 <= value <= MAX_TOP_K, "at least 0, or -1 for all tokens"),
    "dry_sequence_breakers": (lambda value: len(value) <= MAX_BREAKERS, f"at most {MAX_BREAKERS} strings"),
    "repetition_penalty": (
        lambda value: MIN_REPETITION <= value <= MAX_REPETITION,
        f"from {MIN_REPETITION} to {MAX_REPETITION}",
    ),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "allowed_token_ids": (bool, "a list of at least one token id"),
    "seed": (lambda value: -MAX_SEED - 1 <= value <= MAX_SEED, "an integer of 64 bits"),
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    "min_tokens": (lambda value: value >= 0, "at least 0"),
    "logprobs": (lambda value: value >= 0, "at least 0"),
    "prompt_logprobs": (lambda value: value >= 0, "at least 0"),
}
_DEFAULTS: dict[str, Any] = {
    entry.name: entry.default_factory() if callable(entry.default_factory) else entry.default
    for entry in fields(SamplingParams)
}
