"""The parameters that say how long a model stays in memory, and how a reload replaces it."""

from __future__ import annotations

import enum
import re
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from modelserver.config.problem import Report, key_path
from modelserver.config.schema import ModelConfig
from modelserver.core.spelling import did_you_mean, suggest

LOAD_ON_DEMAND = "load_on_demand"
KEEP_ALIVE = "keep_alive"
PINNED = "pinned"
MEMORY_BYTES = "resident_bytes"
RELOAD_MODE = "reload_mode"

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", re.ASCII)
_UNITS_S = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_DIGITS = 18
_WORDS = {"true": True, "false": False}


class ReloadMode(enum.Enum):
    """How a reload replaces a serving version."""

    BESIDE = (
        "beside"  # the new one is loaded while the old one serves: no request waits, but both are in memory for a while
    )
    UNLOAD_FIRST = "unload_first"  # for models that do not fit twice: requests wait in between
    ROLLING = "rolling"  # instance by instance: one more at most, and never none


@dataclass(frozen=True, slots=True)
class OnDemandConfig:
    """The settings of a config. `is_on_demand` and `keep_alive_s` None leave it to the server; inf is for ever.

    `memory_bytes` is the model's use of the scarce kind of memory; None: it is measured.
    """

    is_on_demand: bool | None = None
    keep_alive_s: float | None = None
    is_pinned: bool = False
    memory_bytes: int | None = None


def parse_keep_alive(text: str) -> float:
    """Parse a number with or without `ms`, `s`, `m`, `h` as seconds; negative means for ever. Raises ValueError."""
    word = text.strip()
    if word.startswith("-") and _DURATION.fullmatch(word[1:]) and len(word) <= _MAX_DIGITS:
        return inf
    match = _DURATION.fullmatch(word)
    if match is None or len(word) > _MAX_DIGITS:
        raise ValueError(f"expected seconds, or a duration such as 90s, 5m or 1h (-1: for ever), got '{text:.40}'")
    return float(match[1]) * _UNITS_S[match[2]]


def on_demand_config(config: ModelConfig) -> OnDemandConfig:
    """The settings of a config; invalid values count as not set (`check_on_demand` reports them)."""
    parameters = config.parameters
    keep_alive_s: float | None = None
    with suppress(ValueError):
        keep_alive_s = parse_keep_alive(parameters[KEEP_ALIVE]) if KEEP_ALIVE in parameters else None
    digits = parameters.get(MEMORY_BYTES, "")
    return OnDemandConfig(
        is_on_demand=_WORDS.get(parameters.get(LOAD_ON_DEMAND, "")),
        keep_alive_s=keep_alive_s,
        is_pinned=_WORDS.get(parameters.get(PINNED, ""), False),
        memory_bytes=int(digits) if _is_number(digits) else None,
    )


def reload_mode(config: ModelConfig) -> ReloadMode:
    """The mode in a valid config."""
    return ReloadMode(config.parameters.get(RELOAD_MODE, ReloadMode.BESIDE.value))


def check_on_demand(config: ModelConfig, report: Report) -> None:
    """Report invalid values of these parameters."""
    parameters = config.parameters
    for name in (LOAD_ON_DEMAND, PINNED):
        if name in parameters and parameters[name] not in _WORDS:
            report.add(key_path("parameters", name), f"expected true or false, got '{parameters[name]:.40}'")
    if KEEP_ALIVE in parameters:
        try:
            parse_keep_alive(parameters[KEEP_ALIVE])
        except ValueError as error:
            report.add(key_path("parameters", KEEP_ALIVE), str(error))
    if MEMORY_BYTES in parameters and not _is_number(parameters[MEMORY_BYTES]):
        report.add(
            key_path("parameters", MEMORY_BYTES), f"expected a number of bytes, got '{parameters[MEMORY_BYTES]:.40}'"
        )
    word = parameters.get(RELOAD_MODE, ReloadMode.BESIDE.value)
    words = [mode.value for mode in ReloadMode]
    if word not in words:
        hint = did_you_mean(suggest(word, words))
        report.add(key_path("parameters", RELOAD_MODE), f"expected one of {', '.join(words)}, got '{word:.40}'", hint)


def _is_number(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS
