"""Sampling parameters for models that have a tensor for each, as those of TensorRT-LLM do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import orjson

# By the name of the parameter: the tensors that may stand for it, the first that a model has.
_TENSORS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_new_tokens", "request_output_len"),
    "min_tokens": ("min_tokens", "min_length"),
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "top_k": ("top_k", "runtime_top_k"),
    "min_p": ("min_p",),
    "seed": ("seed", "random_seed"),
    "frequency_penalty": ("frequency_penalty",),
    "presence_penalty": ("presence_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "stop": ("stop_words", "stop"),
    "bad_words": ("bad_words",),
    "n": ("num_return_sequences",),
}
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# Kinds of `structured_outputs` in TensorRT-LLM's words.
_GUIDES = {"json": "json_schema", "json_object": "json", "regex": "regex", "grammar": "ebnf_grammar"}


def sampling_tensors(sampling: Mapping[str, Any], inputs: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The inputs that say what `sampling` says, and the parameters that the model has no input for.

    Texts of an array are a tuple: an element each.
    """
    found: dict[str, Any] = {}
    missing: list[str] = []
    for name, value in sampling.items():
        if value is None:
            continue
        tensor = next((each for each in _TENSORS.get(name, ()) if each in inputs), None)
        if name == "structured_outputs":
            guide = _guide(value)
            if guide is None or not {_GUIDE_TYPE, _GUIDE} <= set(inputs):
                missing.append(name)
            else:
                found[_GUIDE_TYPE], found[_GUIDE] = guide
        elif tensor is None:
            missing.append(name)
        else:
            found[tensor] = tuple(value) if name in ("stop", "bad_words") else value
    return found, missing


def _guide(structure: Mapping[str, Any]) -> tuple[str, str] | None:
    """The type and the text of a constraint; None for a kind that TensorRT-LLM has not."""
    ((kind, value),) = structure.items()
    guide_type = _GUIDES.get(kind)
    if guide_type is None:
        return None
    if kind == "json_object":
        return guide_type, ""
    return guide_type, value if isinstance(value, str) else orjson.dumps(value).decode()
