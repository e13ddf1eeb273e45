"""Settings of request tracing: of the server, and of single models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from modelserver.core.numerals import parse_int
from modelserver.core.spelling import bad_format, nearest_hint
from modelserver.errors import InvalidArgumentError, UnsupportedError

TIMESTAMPS, TENSORS, OFF = "TIMESTAMPS", "TENSORS", "OFF"
TRITON, OPENTELEMETRY = "triton", "opentelemetry"
HTTP, GRPC = "http/protobuf", "grpc"
# OpenTelemetry's samplers; those of a ratio are followed by it.
SAMPLERS = (
    *("always_on", "always_off", "traceidratio"),
    *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
)
_URLS = {HTTP: "localhost:4318/v1/traces", GRPC: "localhost:4317"}
# Triton's older words for levels.
_OLD_LEVELS = {"MIN": TIMESTAMPS, "MAX": TIMESTAMPS}
_MAX_UINT32 = 2**32 - 1

# A client's value of a setting; None removes a model's own value, or resets the server's to its start value.
Changes = Mapping[str, Sequence[str] | str | None]


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The choice of traced requests, and the level of detail.

    Every `rate`-th request is (0: only requests that bring a trace context); `count` is how many more of them (-1: no
    end). A file gets `log_frequency` traces before the next one is begun (0: one file for all).
    """

    levels: frozenset[str] = frozenset()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options of `--trace-config`.

    `bsp_*` configure the export to OpenTelemetry: the queue holds traces, a message to the collector a number of spans.
    """

    start: TraceSettings = field(default_factory=TraceSettings)
    mode: str = TRITON
    file: str = ""
    protocol: str = HTTP
    url: str = _URLS[HTTP]
    # One of SAMPLERS, with ":RATIO" if it has one; "": by the rate.
    sampler: str = ""
    resource: Mapping[str, str] = field(default_factory=lambda: {"service.name": "modelserver"})
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay_ms: int = 5000
    bsp_max_export_batch_size: int = 512


def changed(settings: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """The values of `TraceSettings` that are set, after the changes; a null removes one.

    Raises InvalidArgumentError for an unknown setting or a bad value, UnsupportedError for settings fixed at start.
    """
    values = dict(settings)
    for name, value in changes.items():
        if name in ("trace_file", "trace_mode"):
            what = "trace file location" if name == "trace_file" else "trace mode"
            raise UnsupportedError(f"{what} can not be updated through network protocol")
        if name not in _FIELDS:
            raise InvalidArgumentError(
                f"unknown trace setting '{name:.100}', expected one of {', '.join(_FIELDS)}"
                f"{nearest_hint(name, _FIELDS)}"
            )
        if value is None or (not isinstance(value, str) and not value):
            values.pop(_FIELDS[name], None)
        elif name == "trace_level":
            values["levels"] = parse_levels([value] if isinstance(value, str) else value)
        else:
            values[_FIELDS[name]] = parse_number(name, value)
    return values


_FIELDS = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_LOWEST = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}


def parse_levels(words: Sequence[str]) -> frozenset[str]:
    """Raises InvalidArgumentError for an unknown level, or OFF beside others."""
    levels = [_OLD_LEVELS.get(word, word) for word in words]
    for level in levels:
        if level not in (OFF, TIMESTAMPS, TENSORS):
            raise InvalidArgumentError(
                f"'trace_level' must be one of {OFF}, {TIMESTAMPS}, {TENSORS}, got: {level!r:.40}"
            )
    if OFF in levels and len(set(levels)) > 1:
        raise InvalidArgumentError(f"Expect only one trace level '{OFF}' is specified")
    return frozenset(levels) - {OFF}


def parse_number(name: str, value: Sequence[str] | str) -> int:
    """A number as the protocol writes it: a string. Raises InvalidArgumentError."""
    text = value if isinstance(value, str) else value[0] if len(value) == 1 else None
    try:
        number = parse_int(text) if text is not None else None
    except ValueError:
        number = None
    if number is None:
        raise InvalidArgumentError(f"Unable to parse '{name}', got: {', '.join(value) if text is None else text:.40}")
    if not _LOWEST[name] <= number <= _MAX_UINT32:
        raise InvalidArgumentError(f"Unable to parse '{name}'. Expecting value >= {_LOWEST[name]}, got:{number}")
    return number


def document(settings: TraceSettings, options: TraceOptions) -> dict[str, str | list[str]]:
    """The settings as the protocol shows them."""
    rows: dict[str, str | list[str]] = {
        "trace_level": sorted(settings.levels, key=(TIMESTAMPS, TENSORS).index) or [OFF],
        "trace_rate": str(settings.rate),
        "trace_count": str(settings.count),
    }
    if options.mode == TRITON:
        rows["log_frequency"] = str(settings.log_frequency)
        rows["trace_file"] = options.file
    else:
        rows["url"] = options.url
        rows["resource"] = [f"{key}={value}" for key, value in options.resource.items()]
        rows["bsp_max_queue_size"] = str(options.bsp_max_queue_size)
        rows["bsp_schedule_delay"] = str(options.bsp_schedule_delay_ms)
        rows["bsp_max_export_batch_size"] = str(options.bsp_max_export_batch_size)
    rows["trace_mode"] = options.mode
    return rows


def settings_of_environment(flags: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The settings of `--trace-config` that OpenTelemetry's variables give and these flags do not.

    Only in the mode opentelemetry, which OTEL_TRACES_EXPORTER=otlp asks for too: then each request is traced that the
    sampler takes. Raises InvalidArgumentError for a bad number.
    """
    given = {text.partition("=")[0] for text in flags}
    found = []
    if "mode" not in given and environment.get("OTEL_TRACES_EXPORTER") == "otlp":
        sampler = environment.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
        ratio = environment.get("OTEL_TRACES_SAMPLER_ARG", "")
        found += [f"mode={OPENTELEMETRY}", f"{OPENTELEMETRY},sampler={sampler}{f':{ratio}' if ratio else ''}"]
        found += [] if "level" in given else [f"level={TIMESTAMPS}"]
    elif f"mode={OPENTELEMETRY}" not in flags:
        return []
    general = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general
    if protocol and f"{OPENTELEMETRY},protocol" not in given:
        found.append(f"{OPENTELEMETRY},protocol={protocol}")
    for key in ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"):
        variable = f"OTEL_{key.upper()}"
        if environment.get(variable) and f"{OPENTELEMETRY},{key}" not in given:
            found.append(f"{OPENTELEMETRY},{key}={_flag_number(variable, key, environment[variable])}")
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not url and (base := environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        url = base if protocol == GRPC else f"{base.rstrip('/')}/v1/traces"
    if url and f"{OPENTELEMETRY},url" not in given:
        found.append(f"{OPENTELEMETRY},url={url}")
    attributes = environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    if service := environment.get("OTEL_SERVICE_NAME"):
        attributes.append(f"service.name={service}")
    # These come before the flags: the last value of an attribute counts.
    return found + [f"{OPENTELEMETRY},resource={unquote(text.strip())}" for text in attributes if "=" in text]


def parse_trace_config(flags: Sequence[str]) -> TraceOptions:
    """The options that `--trace-config [<mode>,]<key>=<value>` flags write. Raises InvalidArgumentError."""
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    levels: list[str] = []
    resource = dict(TraceOptions().resource)
    for text in flags:
        head, equals, value = text.partition("=")
        mode, comma, key = head.partition(",")
        if not comma:
            mode, key = "", head
        if not equals:
            raise bad_format("--trace-config", "<trace mode>,<setting>=<value>' or '<setting>=<value>", text)
        if (mode, key) not in _KEYS:
            known = [f"{mode},{key}" if mode else key for mode, key in _KEYS]
            raise InvalidArgumentError(
                f"--trace-config expects [<mode>,]<key>=<value> with one of {', '.join(known)}, got '{text}'"
                f"{nearest_hint(head, known)}"
            )
        if key == "level":
            levels.append(value)
        elif key == "resource":
            name, _, what = value.partition("=")
            resource[name] = what
        elif key in _WORDS:
            values[key] = _WORDS[key](value)
        else:
            name = _KEYS[mode, key]
            number = _flag_number(f"--trace-config {head}", key, value)
            (settings if mode != OPENTELEMETRY else values)[name] = number
    if levels:
        settings["levels"] = parse_levels(levels)
    values.setdefault("url", _URLS[values.get("protocol", HTTP)])
    return replace(TraceOptions(), start=TraceSettings(**settings), resource=resource, **values)


def _parse_mode(text: str) -> str:
    if text not in (TRITON, OPENTELEMETRY):
        raise InvalidArgumentError(
            f"invalid value for trace mode option: {text}. --trace-config mode expects {TRITON} or {OPENTELEMETRY}"
        )
    return text


def _parse_protocol(text: str) -> str:
    if text not in _URLS:
        raise InvalidArgumentError(f"OpenTelemetry's protocol: expected {HTTP} or {GRPC}, got '{text}'")
    return text


def parse_sampler(text: str) -> str:
    """A sampler of OpenTelemetry, NAME or NAME:RATIO. Raises InvalidArgumentError."""
    name, colon, ratio = text.partition(":")
    try:
        is_ratio = not colon or (name.endswith("traceidratio") and 0 <= float(ratio) <= 1)
    except ValueError:
        is_ratio = False
    if name not in SAMPLERS or not is_ratio:
        raise InvalidArgumentError(
            f"OpenTelemetry's sampler: expected one of {', '.join(SAMPLERS)}, with :RATIO from 0 to 1 after those of a "
            f"ratio, got '{text}'{nearest_hint(name, SAMPLERS)}"
        )
    return text


_WORDS: dict[str, Callable[[str], str]] = {
    "mode": _parse_mode,
    "file": str,
    "url": str,
    "protocol": _parse_protocol,
    "sampler": parse_sampler,
}
# A rate of 0 can only be given at start, as with Triton.
_LOWEST_FLAGS = {"rate": 0, "count": -1, "log-frequency": 0, "bsp_schedule_delay": 0}


def _flag_number(source: str, key: str, value: str) -> int:
    try:
        number = parse_int(value)
    except ValueError:
        number = None
    lowest = _LOWEST_FLAGS.get(key, 1)
    if number is None or not lowest <= number <= _MAX_UINT32:
        raise InvalidArgumentError(
            f"Bad option: \"{source}\". {key} expects an integer of at least {lowest}, got '{value}'"
        )
    return number


_KEYS: dict[tuple[str, str], str] = {
    ("", "mode"): "mode",
    ("", "level"): "levels",
    ("", "rate"): "rate",
    ("", "count"): "count",
    (TRITON, "file"): "file",
    (TRITON, "log-frequency"): "log_frequency",
    (OPENTELEMETRY, "protocol"): "protocol",
    (OPENTELEMETRY, "url"): "url",
    (OPENTELEMETRY, "sampler"): "sampler",
    (OPENTELEMETRY, "resource"): "resource",
    (OPENTELEMETRY, "bsp_max_queue_size"): "bsp_max_queue_size",
    (OPENTELEMETRY, "bsp_schedule_delay"): "bsp_schedule_delay_ms",
    (OPENTELEMETRY, "bsp_max_export_batch_size"): "bsp_max_export_batch_size",
}
