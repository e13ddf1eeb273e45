"""The flags of language models."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from modelserver.bench.llm.options import Length, LlmOptions, PromptOptions, Target
from modelserver.bench.options import LoadOptions, Mode, ReportOptions
from modelserver.bench.work import EndpointType
from modelserver.client.address import Address
from modelserver.core.documents import parse_json
from modelserver.core.numerals import parse_float
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError

# genai-perf's long names mean the same.
_TARGETS = {
    "ttft": Target.TTFT,
    "time_to_first_token": Target.TTFT,
    "itl": Target.ITL,
    "tpot": Target.ITL,
    "inter_token_latency": Target.ITL,
    "latency": Target.LATENCY,
    "e2el": Target.LATENCY,
    "request_latency": Target.LATENCY,
}


# Flags of tensors that a user would miss the effect of, with what to use instead.
_REFUSED = {
    "protocol": ("-i grpc", "prompts go over HTTP; leave it out"),
    "csv": ("-f", "use --json FILE or --html FILE"),
    "profile_export_file": ("--profile-export-file", "use --json FILE or --html FILE"),
    "input_data": ("--input-data", "use --prompt-file FILE"),
    "batch_size": ("-b", "each prompt is a request; use --concurrency-range"),
    "shared_memory": ("--shared-memory", "prompts are text; leave it out"),
    "collect_metrics": ("--collect-metrics", "leave it out, and read the server's metrics port"),
}
# Others, of which it is only said that nothing follows from them.
_WITHOUT_EFFECT = (
    "latency_threshold",
    "max_trials",
    "measurement_interval",
    "measurement_mode",
    "measurement_request_count",
    "model_version",
    "percentile",
    "request_parameter",
    "shape",
    "stability_percentage",
    "string_data",
    "string_length",
    "verbose",
    "verbose_csv",
)


def add_llm_flags(group: Any) -> None:
    """Add the flags to the parser of the bench."""
    group.add_argument("--llm", action="store_true", help="Send prompts, measure tokens.")
    group.add_argument("--endpoint-type", default="chat", choices=[kind.value for kind in EndpointType])
    group.add_argument("--endpoint", default="", metavar="PATH", help="The route, if it is another.")
    group.add_argument("--input-tokens", default="128", metavar="MEAN[:STDDEV]", help="Words of made-up prompts.")
    group.add_argument("--output-tokens", default="128", metavar="MEAN[:STDDEV]", help="max_tokens; 0 sends none.")
    group.add_argument("--prompt-file", type=Path, metavar="FILE", help="JSONL: prompt or messages, max_tokens.")
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="Different made-up prompts.")
    group.add_argument(
        "--extra-inputs", action="append", default=[], metavar="NAME:VALUE", help="JSON value. Repeatable."
    )
    group.add_argument("--no-stream", action="store_true", help="Whole answers instead of events.")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft, itl, latency: what a good request meets."
    )


def llm_options(
    found: argparse.Namespace,
    *,
    given: Set[str],
    address: Address,
    load: LoadOptions,
    report: ReportOptions,
    headers: Mapping[str, str],
) -> LlmOptions:
    """`given` names what has not its default. Raises InvalidArgumentError naming the flag and what it expects."""
    for name, (flag, instead) in _REFUSED.items():
        if name in given:
            raise InvalidArgumentError(f"{flag} is not of --llm: {instead}")
    if load.mode is Mode.PERIODIC:
        raise InvalidArgumentError("--periodic-concurrency-range is not of --llm; use --concurrency-range")
    if load.levels.is_endless or load.is_binary:
        raise InvalidArgumentError("--llm needs a range with an end, and goes through all of it")
    if found.num_prompts < 1:
        raise InvalidArgumentError(f"--num-prompts expects at least 1, got {found.num_prompts}")
    output = _length(found.output_tokens, "--output-tokens")
    return LlmOptions(
        model=found.model,
        address=address,
        endpoint_type=EndpointType(found.endpoint_type),
        path=found.endpoint if found.endpoint.startswith("/") or not found.endpoint else "/" + found.endpoint,
        headers=headers,
        is_streaming=not found.no_stream,
        extra=dict(_extra(text) for text in found.extra_inputs),
        prompts=PromptOptions(
            file=found.prompt_file,
            num_prompts=found.num_prompts,
            input_tokens=_length(found.input_tokens, "--input-tokens"),
            output_tokens=output if output.mean else None,
            seed=load.seed,
        ),
        load=load,
        num_requests=found.request_count,
        num_warmup_requests=found.warmup_request_count,
        goodput=dict(_target(text) for text in found.goodput),
        report=report,
        notes=tuple(
            f"--{name.replace('_', '-')} has no effect: it is not of --llm" for name in _WITHOUT_EFFECT if name in given
        ),
    )


def _length(text: str, flag: str) -> Length:
    mean, colon, deviation = text.partition(":")
    try:
        length = Length(parse_float(mean), parse_float(deviation) if colon else 0.0)
    except ValueError:
        raise InvalidArgumentError(f"{flag} expects <mean> or <mean>:<stddev>, got '{text}'") from None
    if not (0 <= length.mean < math.inf and 0 <= length.deviation < math.inf):
        raise InvalidArgumentError(f"{flag} expects numbers of at least 0, got '{text}'")
    return length


def _extra(text: str) -> tuple[str, Any]:
    name, colon, value = text.partition(":")
    if not colon or not name:
        raise InvalidArgumentError(f"--extra-inputs expects <name>:<value>, got '{text}'")
    try:
        return name, parse_json(value, f"--extra-inputs {name}")
    except ValueError:
        return name, value


def _target(text: str) -> tuple[Target, float]:
    name, _, limit = text.partition(":")
    if name not in _TARGETS:
        known = ", ".join(target.value for target in Target)
        raise InvalidArgumentError(f"--goodput knows {known}, got '{name}'{nearest_hint(name, _TARGETS)}")
    try:
        limit_ms = parse_float(limit)
    except ValueError:
        limit_ms = math.nan
    if not 0 < limit_ms < math.inf:
        raise InvalidArgumentError(f"--goodput expects <name>:<milliseconds>, got '{text}'")
    return _TARGETS[name], limit_ms
