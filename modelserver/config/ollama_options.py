"""Ollama's options of a model: their types, and what they are among the sampling parameters of vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.core.spelling import did_you_mean, suggest
from modelserver.errors import InvalidArgumentError

MAX_STOPS = 64
_INTEGER, _NUMBER, _FLAG, _TEXTS = "integer", "float32", "boolean", "array"
# The options that say something about the text: the type in Ollama's words, and the name in vLLM's.
_SAMPLING: dict[str, tuple[str, str]] = {
    "num_predict": (_INTEGER, "max_tokens"),
    "temperature": (_NUMBER, "temperature"),
    "top_k": (_INTEGER, "top_k"),
    "top_p": (_NUMBER, "top_p"),
    "min_p": (_NUMBER, "min_p"),
    "repeat_penalty": (_NUMBER, "repetition_penalty"),
    "presence_penalty": (_NUMBER, "presence_penalty"),
    "frequency_penalty": (_NUMBER, "frequency_penalty"),
    "typical_p": (_NUMBER, "typical_p"),
    "mirostat": (_INTEGER, "mirostat"),
    "mirostat_tau": (_NUMBER, "mirostat_tau"),
    "mirostat_eta": (_NUMBER, "mirostat_eta"),
    "seed": (_INTEGER, "seed"),
    "stop": (_TEXTS, "stop"),
}
# The options that tell Ollama how to run a model. In a request only their types are checked.
_RUNNING: dict[str, str] = {
    "num_ctx": _INTEGER,
    "num_keep": _INTEGER,
    "num_batch": _INTEGER,
    "num_gpu": _INTEGER,
    "main_gpu": _INTEGER,
    "num_thread": _INTEGER,
    "draft_num_predict": _INTEGER,
    "repeat_last_n": _INTEGER,
    "use_mmap": _FLAG,
    "use_mlock": _FLAG,
    "low_vram": _FLAG,
    "numa": _FLAG,
    "penalize_newline": _FLAG,
    "f16_kv": _FLAG,
    "logits_all": _FLAG,
    "vocab_only": _FLAG,
    "embedding_only": _FLAG,
    "num_gqa": _INTEGER,
    "rope_frequency_base": _NUMBER,
    "rope_frequency_scale": _NUMBER,
}
# Samplers that this server does not have, and the values of each that ask for nothing.
_REFUSED: dict[str, tuple[float, ...]] = {"tfs_z": (0, 1)}
# The type of each option, in Ollama's words.
OPTION_KINDS = {**{name: kind for name, (kind, _) in _SAMPLING.items()}, **_RUNNING, **dict.fromkeys(_REFUSED, _NUMBER)}
_FLAGS = {"true": True, "false": False, "1": True, "0": False, "t": True, "f": False}


def is_option(name: str) -> bool:
    """Whether Ollama has an option of that name."""
    return name in OPTION_KINDS


def check_option(name: str, value: Any) -> Any:
    """The value of a known option in its type. Raises InvalidArgumentError in Ollama's words."""
    kind = OPTION_KINDS[name]
    if kind == _INTEGER and type(value) is float and value.is_integer():
        value = int(value)
    if kind == _TEXTS and isinstance(value, str):
        value = [value]
    is_right = {
        _INTEGER: type(value) is int,
        _NUMBER: type(value) in (int, float),
        _FLAG: isinstance(value, bool),
        _TEXTS: isinstance(value, list) and len(value) <= MAX_STOPS and all(isinstance(each, str) for each in value),
    }[kind]
    if not is_right:
        detail = f" of at most {MAX_STOPS} strings" if kind == _TEXTS else ""
        raise InvalidArgumentError(f'option "{name}" must be of type {kind}{detail}, got {value!r:.60}')
    if name in _REFUSED and value not in _REFUSED[name]:
        raise InvalidArgumentError(f'option "{name}" is not supported: this server has no such sampler')
    return [each for each in value if each] if kind == _TEXTS else value


def option_of_text(name: str, text: str) -> Any:
    """The value of an option that is written as text. Raises InvalidArgumentError, also for an unknown name."""
    kind = OPTION_KINDS.get(name)
    if kind is None:
        hint = did_you_mean(suggest(name, list(OPTION_KINDS)))
        raise InvalidArgumentError(f"unknown parameter '{name:.60}'{'; ' + hint if hint else ''}")
    value: Any = text
    try:
        if kind == _INTEGER:
            value = int(text)
        elif kind == _NUMBER:
            value = float(text)
        elif kind == _FLAG:
            value = _FLAGS[text.lower()]
    except (ValueError, KeyError):
        raise InvalidArgumentError(f"invalid {kind} value {text!r:.60} of parameter '{name}'") from None
    return check_option(name, value)


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What checked options say about the text, by vLLM's names and in its values.

    Ollama says "no bound" and "any seed" by negative numbers.
    """
    found = {_SAMPLING[name][1]: value for name, value in options.items() if name in _SAMPLING}
    if found.get("max_tokens") is not None and found["max_tokens"] < 0:
        found["max_tokens"] = None
    if not found.get("mirostat"):
        for name in ("mirostat", "mirostat_tau", "mirostat_eta"):
            found.pop(name, None)
    if found.get("typical_p") in (0, 1):
        del found["typical_p"]
    if found.get("top_k") == 0:
        found["top_k"] = -1
    if found.get("seed", 0) < 0:
        del found["seed"]
    if not found.get("stop", ("",)):
        del found["stop"]
    return found
