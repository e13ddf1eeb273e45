"""`options` and `keep_alive` of a request -> sampling parameters by vLLM's names, and seconds."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from modelserver.config.ollama_options import check_option, is_option, sampling_of
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields

logger = logging.getLogger(__name__)

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
        if not is_option(name):
            logger.warning("invalid option provided: option=%.100s", name)
            continue
        try:
            found[name] = check_option(name, value)
        except InvalidArgumentError as error:
            raise ParameterError(error.message, f"options.{name}", Fault.INVALID_VALUE) from None
    return {"max_tokens": None, **sampling_of(found)}


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
