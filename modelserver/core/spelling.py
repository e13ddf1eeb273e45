"""What people write in flags, configs and calls: words for booleans, and a guess at what an unknown name means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from modelserver.errors import InvalidArgumentError

TRUE_WORDS = frozenset({"true", "1", "yes", "on", "y", "t"})
FALSE_WORDS = frozenset({"false", "0", "no", "off", "n", "f"})
BOOL_EXPECTATION = "true or false (also 1/0, yes/no, on/off)"

MAX_LENGTH = 100
MAX_CANDIDATES = 500

# Common wrong names -> the field; used if the message has that field.
_SYNONYMS = {
    "batch": "max_batch_size",
    "batch_size": "max_batch_size",
    "batching": "dynamic_batching",
    "cache": "response_cache",
    "count_per_device": "count",
    "datatype": "data_type",
    "device": "kind",
    "devices": "gpus",
    "dtype": "data_type",
    "dynamic_batch": "dynamic_batching",
    "dynamic_batcher": "dynamic_batching",
    "ensemble": "ensemble_scheduling",
    "filename": "default_model_filename",
    "framework": "backend",
    "gpu": "gpus",
    "instances": "instance_group",
    "max_batch": "max_batch_size",
    "max_delay": "max_queue_delay_microseconds",
    "max_queue_delay": "max_queue_delay_microseconds",
    "max_queue_delay_us": "max_queue_delay_microseconds",
    "max_queue_delay_ms": "max_queue_delay_microseconds",
    "metrics": "model_metrics",
    "model_filename": "default_model_filename",
    "preferred_batch": "preferred_batch_size",
    "replicas": "count",
    "sequence_batcher": "sequence_batching",
    "shape": "dims",
    "steps": "step",
    "timeout": "default_timeout_microseconds",
    "timeout_us": "default_timeout_microseconds",
    "type": "data_type",
    "value": "string_value",
    "versions": "version_policy",
    "warmup": "model_warmup",
}

_DATATYPES = {
    "BYTES": "TYPE_STRING",
    "BFLOAT16": "TYPE_BF16",
    "DOUBLE": "TYPE_FP64",
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "FLOAT32": "TYPE_FP32",
    "FLOAT64": "TYPE_FP64",
    "HALF": "TYPE_FP16",
    "INT": "TYPE_INT32",
    "LONG": "TYPE_INT64",
}


def suggest_field(name: str, fields: Iterable[str]) -> str | None:
    """The field that `name` most likely means among the `fields` of its message, or None."""
    known = list(fields)
    synonym = _SYNONYMS.get(name.lower())
    if synonym in known:
        return synonym
    return suggest(name, known)


def suggest_enum(name: str, values: Iterable[str]) -> str | None:
    """The enum value that `name` most likely means: with its prefix (`TYPE_`, `KIND_`), or spelled well."""
    known = list(values)
    synonym = _DATATYPES.get(name.upper().removeprefix("TYPE_"))
    if synonym in known:
        return synonym
    for value in known:
        if value.endswith("_" + name.upper()):
            return value
    return suggest(name, known)


def suggest(name: str, known: Iterable[str]) -> str | None:
    """The nearest of the `known` names without regard to case, or None without a close match."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    # Comparing is slow, and files are not trusted.
    if len(name) > MAX_LENGTH or len(by_lower) > MAX_CANDIDATES:
        return None
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[nearest[0]] if nearest else None


def did_you_mean(name: str | None) -> str | None:
    """The hint for a suggestion; None without a suggestion."""
    return f"did you mean {name}?" if name else None


def bad_format(flag_name: str, form: str, text: str) -> InvalidArgumentError:
    """The error for a value of several parts that is not of this form; the first words are Triton's."""
    return InvalidArgumentError(f"{flag_name} option format is '{form}', got '{text}'")


def parse_bool(text: str) -> bool | None:
    """Parse `text` as a boolean in one of Triton's forms; None if it is not one."""
    word = text.strip().lower()
    return word in TRUE_WORDS if word in TRUE_WORDS | FALSE_WORDS else None


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean '--http-port'?`, or empty without a close match."""
    nearest = suggest(name, known)
    return f"; did you mean '{nearest}'?" if nearest else ""
