"""`options` and `keep_alive` of a request -> sampling parameters by vLLM's names, and seconds."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.ollama.limits import MAX_STOPS

logger = logging.getLogger(__name__)

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
# The options that tell Ollama how to run a model. Here the model's config does, so only their types are checked.
_WITHOUT_EFFECT: dict[str, str] = {
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
}
# Samplers that this server does not have, and the value of each that asks for nothing.
_REFUSED: dict[str, tuple[float, ...]] = {"tfs_z": (0, 1)}
OPTION_TYPES = (
    {name: kind for name, (kind, _) in _SAMPLING.items()} | _WITHOUT_EFFECT | dict.fromkeys(_REFUSED, _NUMBER)
)

_DURATION = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+", re.ASCII)
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_options(fields: Fields) -> dict[str, Any]:
    """The sampling parameters that `options` asks for. Unknown options are logged, as Ollama does.

    Raises ParameterError for a value of the wrong type, and for a sampler that this server does not have.
    """
    options = fields.fields("options")
    found: dict[str, Any] = {}
    for name, value in options.document.items() if options is not None else ():
        if value is None:
            continue
        if name in _SAMPLING:
            kind, ours = _SAMPLING[name]
            found[ours] = _checked(name, value, kind)
        elif name in _REFUSED:
            if _checked(name, value, _NUMBER) not in _REFUSED[name]:
                raise ParameterError(
                    f'option "{name}" is not supported: this server has no such sampler',
                    f"options.{name}",
                    Fault.UNSUPPORTED_PARAMETER,
                )
        elif name in _WITHOUT_EFFECT:
            _checked(name, value, _WITHOUT_EFFECT[name])
        else:
            logger.warning("invalid option provided: option=%.100s", name)
    return _as_vllm(found)


def _as_vllm(found: dict[str, Any]) -> dict[str, Any]:
    """The same in the values of vLLM: Ollama says "no bound" and "any seed" by negative numbers."""
    num_predict = found.setdefault("max_tokens", None)
    if num_predict is not None and num_predict < 0:
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


def _checked(name: str, value: Any, kind: str) -> Any:
    """The value, if it is of the type. Raises ParameterError in Ollama's words."""
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
        raise ParameterError(
            f'option "{name}" must be of type {kind}{detail}, got {value!r:.60}',
            f"options.{name}",
            Fault.INVALID_VALUE,
        )
    return [each for each in value if each] if kind == _TEXTS else value


def read_keep_alive(fields: Fields) -> float | None:
    """`keep_alive` in seconds: infinite for a negative one, None without one. Raises ParameterError."""
    value = fields.document.get("keep_alive")
    if value is None:
        return None
    if type(value) in (int, float):
        seconds = float(value)
    elif isinstance(value, str) and value == "0":
        seconds = 0.0
    elif isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))
        seconds = -seconds if value.startswith("-") else seconds
    else:
        raise fields.wrong("keep_alive", 'a number of seconds, or a duration such as "5m"', value)
    return math.inf if seconds < 0 else seconds
