"""How tokens are guessed: vLLM's `speculative_config`, with its names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.backend import UnsupportedError

from ..json_fields import decoded, integer, number, string, unknown, wrong

logger = logging.getLogger(__name__)

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
# Those that read files of their own.
WITH_MODEL = {"draft_model": "a draft model", "eagle": "a head for this model", "eagle3": "a head for this model"}
# Those of one trained layer behind the network; that of `mtp` is in the model's own checkpoint.
TRAINED = ("eagle", "eagle3", "mtp")
# vLLM's other methods, and why they are refused.
_REFUSED = dict.fromkeys(
    ("medusa", "mlp_speculator", "dflash", "dspark", "ngram_gpu", "custom_class"),
    "heads of this kind are not computed here",
) | {
    "ngram_gpu": "ngram does the same",
    "custom_class": "no code of others is run",
}
# Of vLLM; they change no text, or say what is so in any case.
_WITHOUT_MEANING = frozenset(
    {
        "disable_logprobs",
        "disable_log_stats",
        "disable_padded_drafter_batch",
        "draft_sample_method",
        "enforce_eager",
        "parallel_drafting",
        "rejection_sample_method",
        "revision",
        "use_local_argmax_reduction",
    }
)
# With more running sequences a step is busy enough without drafts.
_CPU_SEQUENCES = 4
_GPU_SEQUENCES = 32
_MOST_TOKENS = 64
_MOST_DEPTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """`method` is one of METHODS, or "prediction" for what clients predict alone. A step checks up to
    `num_speculative_tokens` drafts of a sequence.

    `prompt_lookup_min` to `prompt_lookup_max` tokens are looked for earlier in the text (ngram). A match of suffixes
    counts up to `max_tree_depth` tokens, gives `max_spec_factor` times as many drafts, and each draft is as probable
    as `min_token_prob` at least; `max_cached_requests` past answers are kept. `model` is the directory of the draft
    model, or head. With more than `disable_by_batch_size` running sequences there are no drafts; None: the device
    decides.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    max_tree_depth: int = 24
    max_cached_requests: int = 10000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    model: str | None = None
    disable_by_batch_size: int | None = None

    def most_sequences(self, *, is_gpu: bool) -> int:
        """How many sequences may run while there are drafts."""
        return self.disable_by_batch_size or (_GPU_SEQUENCES if is_gpu else _CPU_SEQUENCES)

    def most_drafts(self, max_num_seqs: int, *, is_gpu: bool) -> int:
        """The most drafts that a step checks of all its sequences together (`Speculator`)."""
        most = self.most_sequences(is_gpu=is_gpu)
        return max(
            min(num * self.num_speculative_tokens, 1 + most + self.num_speculative_tokens - num)
            for num in range(1, 1 + min(max_num_seqs, most))
        )


# Of requests with a prediction, on a model that speculates nothing else.
PREDICTED = SpeculativeConfig(method="prediction", num_speculative_tokens=16)


def read_speculative_config(name: str, value: Any) -> SpeculativeConfig | None:
    """From an object, or JSON text of one; None for an empty one.

    Raises InvalidArgumentError, which names the field, and UnsupportedError for methods that this engine lacks.
    """
    if isinstance(value, str):
        value = decoded(name, value) if value.strip() else None
    if value is None or value == {}:
        return None
    if not isinstance(value, Mapping):
        raise wrong(name, 'an object, such as {"method": "ngram", "num_speculative_tokens": 8}', value)
    given = {field: what for field, what in value.items() if what is not None}
    method = _method(name, given)
    read: dict[str, Any] = {"method": method}
    for field, (convert, least, most) in _FIELDS.items():
        if field in given:
            what = convert(f"{name}.{field}", given.pop(field))
            if not least <= what <= most:
                raise wrong(f"{name}.{field}", f"from {least} to {most}", what)
            read[field.removeprefix("suffix_decoding_")] = what
    if given.pop("draft_tensor_parallel_size", 1) != 1:
        raise wrong(f"{name}.draft_tensor_parallel_size", "1 or absent", value["draft_tensor_parallel_size"])
    for field in sorted(_WITHOUT_MEANING & given.keys()):
        logger.info("%s.%s=%r is vLLM's and means nothing here", name, field, given.pop(field))
    if given:
        known = ["method", "model", *_FIELDS]
        raise unknown(f"{name}.{min(given)}", [f"{name}.{field}" for field in known])
    _complete_lookup(name, read)
    if method in WITH_MODEL:
        read["model"] = value["model"]
    read.setdefault("num_speculative_tokens", _USUAL_TOKENS[method])
    return SpeculativeConfig(**read)


# Measured on a CPU, see docs/llm.md: more drafts cost more than they give there.
_USUAL_TOKENS = {"ngram": 8, "suffix": 8, "draft_model": 4, "eagle": 3, "eagle3": 3, "mtp": 1}
_FIELDS: dict[str, tuple[Any, float, float]] = {
    "num_speculative_tokens": (integer, 1, _MOST_TOKENS),
    "prompt_lookup_min": (integer, 1, _MOST_DEPTH),
    "prompt_lookup_max": (integer, 1, _MOST_DEPTH),
    "suffix_decoding_max_tree_depth": (integer, 2, _MOST_DEPTH),
    "suffix_decoding_max_cached_requests": (integer, 0, 1 << 20),
    "suffix_decoding_max_spec_factor": (number, 0.1, 100.0),
    "suffix_decoding_min_token_prob": (number, 0.0, 1.0),
    "disable_by_batch_size": (integer, 1, 1 << 20),
}


def _method(name: str, given: dict[str, Any]) -> str:
    """As vLLM does, a model alone is a draft model, unless it is called "ngram"."""
    model = string(f"{name}.model", given.pop("model")) if "model" in given else None
    method = given.pop("method", None)
    if method is None and model is not None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    if method is None:
        raise wrong(f"{name}.method", f"one of {', '.join(METHODS)}", None)
    if isinstance(method, str) and method.endswith("_mtp"):  # vLLM has a name for each family
        method = "mtp"
    if method == "mtp" and model is not None:
        raise wrong(f"{name}.model", "no model with method mtp, whose layer is in the model's own checkpoint", model)
    if method in _REFUSED:
        raise UnsupportedError(
            f"{name}.method {method} is not supported: {_REFUSED[method]}; there are {', '.join(METHODS)}"
        )
    if method not in METHODS:
        raise wrong(f"{name}.method", f"one of {', '.join(METHODS)}", method)
    if method in WITH_MODEL and model is None:
        raise wrong(f"{name}.model", f"the directory of {WITH_MODEL[method]}", None)
    return str(method)


def _complete_lookup(name: str, read: dict[str, Any]) -> None:
    """One bound of the two is both, as in vLLM."""
    low, high = read.get("prompt_lookup_min"), read.get("prompt_lookup_max")
    if low is None and high is None:
        return
    read["prompt_lookup_min"] = high if low is None else low
    read["prompt_lookup_max"] = low if high is None else high
    if read["prompt_lookup_min"] > read["prompt_lookup_max"]:
        raise wrong(f"{name}.prompt_lookup_min", f"at most prompt_lookup_max ({high})", low)
