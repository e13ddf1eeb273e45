"""Parses the command line of the bench."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from modelserver.bench.encode import Parameter
from modelserver.bench.flags import WITHOUT_EFFECT, make_parser
from modelserver.bench.input_data import RANDOM, ZERO, DataOptions
from modelserver.bench.llm.arguments import llm_options
from modelserver.bench.llm.options import LlmOptions
from modelserver.bench.options import (
    BenchOptions,
    LoadOptions,
    MeasurementOptions,
    MetricsOptions,
    Mode,
    ReportOptions,
    RequestOptions,
    SharedMemory,
)
from modelserver.bench.report_files import check_file
from modelserver.bench.search import LoadRange, parse_range
from modelserver.bench.window import Stability
from modelserver.bench.work import Sequences
from modelserver.client.address import (
    URL_VARIABLE,
    Address,
    Tls,
    check_files,
    environment_headers,
    environment_tls,
    parse_address,
)
from modelserver.core.numerals import is_digits
from modelserver.core.spelling import TRUE_WORDS
from modelserver.errors import InvalidArgumentError

HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002
DEFAULT_SEQUENCE_LENGTH = 20


def wants_help(words: Sequence[str]) -> bool:
    return any(word in ("-h", "--help", "-?") for word in words)


def wants_version(words: Sequence[str]) -> bool:
    return "--version" in words


def parse_arguments(words: Sequence[str]) -> BenchOptions | LlmOptions:
    """The options on the command line. Raises InvalidArgumentError that names the flag and the expected form."""
    parser = make_parser()
    found = parser.read(words)
    if not found.model:
        raise InvalidArgumentError("-m is missing: say which model to measure")
    if found.llm or found.service_kind == "openai":
        return llm_options(
            found,
            given={name for name, value in vars(found).items() if value != parser.get_default(name)},
            address=_address(found, is_grpc=False),
            load=_load(found),
            report=_report(found),
            headers=_headers(found.headers),
        )
    if found.service_kind != "triton":
        raise InvalidArgumentError(
            f"--service-kind {found.service_kind} is not there; the bench speaks KServe and Triton, "
            "and to language models with --llm"
        )
    is_grpc = found.protocol == "grpc"
    if found.streaming and not is_grpc:
        raise InvalidArgumentError("--streaming needs gRPC: add -i grpc")
    return BenchOptions(
        model=found.model,
        version=found.model_version,
        is_grpc=is_grpc,
        is_streaming=found.streaming,
        address=_address(found, is_grpc),
        composing=tuple(_composing(entry) for entry in found.bls_composing_models.split(",") if entry),
        load=_load(found),
        measurement=_measurement(found),
        request=_request(found),
        metrics=_metrics(found),
        report=_report(found),
        notes=tuple(
            f"--{name.replace('_', '-')} has no effect: {reason}"
            for name, reason in WITHOUT_EFFECT.items()
            if getattr(found, name) is not None
        ),
    )


def _report(found: argparse.Namespace) -> ReportOptions:
    """Raises InvalidArgumentError for a file that could not be written."""
    if found.json not in ("", "-"):
        check_file(Path(found.json), "--json")
    for path, flag in ((found.csv, "-f"), (found.profile_export_file, "--profile-export-file"), (found.html, "--html")):
        if path is not None:
            check_file(path, flag)
    return ReportOptions(
        verbosity=found.verbose,
        csv_file=found.csv,
        is_csv_verbose=found.verbose_csv,
        export_file=found.profile_export_file,
        json_file=found.json,
        html_file=found.html,
        price_per_hour=found.price_per_hour,
    )


def _address(found: argparse.Namespace, is_grpc: bool) -> Address:
    url = found.url or os.environ.get(URL_VARIABLE, "") or "localhost"
    default = environment_tls()
    is_secure = url.startswith(("https://", "grpcs://"))
    if not is_grpc:
        tls = Tls(
            found.ssl_https_ca_certificates_file or default.authorities_file,
            found.ssl_https_client_certificate_file or default.certificate_file,
            found.ssl_https_private_key_file or default.key_file,
            is_peer_verified=bool(found.ssl_https_verify_peer),
            is_host_verified=bool(found.ssl_https_verify_host),
        )
        check_files(tls)
        return parse_address(url, default_port=HTTP_PORT, tls=tls if is_secure else None)
    tls = Tls(
        found.ssl_grpc_root_certifications_file or default.authorities_file,
        found.ssl_grpc_certificate_chain_file or default.certificate_file,
        found.ssl_grpc_private_key_file or default.key_file,
    )
    check_files(tls)
    is_secure = is_secure or found.ssl_grpc_use_ssl.lower() in TRUE_WORDS
    return parse_address(url, default_port=GRPC_PORT, tls=tls if is_secure else None)


def _composing(entry: str) -> tuple[str, str]:
    name, _, version = entry.partition(":")
    return name.strip(), version.strip()


def _load(found: argparse.Namespace) -> LoadOptions:
    mode, levels, intervals = _levels(found)
    if mode is Mode.PERIODIC and not (found.streaming and found.profile_export_file):
        raise InvalidArgumentError("--periodic-concurrency-range needs --streaming and --profile-export-file")
    if levels.is_endless and not found.latency_threshold:
        raise InvalidArgumentError("a range without an end needs --latency-threshold")
    return LoadOptions(
        mode=mode,
        levels=levels,
        is_binary=found.binary_search,
        is_poisson=found.request_distribution == "poisson",
        intervals_ns=intervals,
        request_period=found.request_period,
        num_workers=found.max_threads,
        lanes_per_connection=found.streams_per_connection,
        max_lanes=found.max_connections,
        num_sequences=found.num_of_sequences,
        sequences=_sequences(found),
        seed=found.seed,
    )


def _levels(found: argparse.Namespace) -> tuple[Mode, LoadRange, tuple[int, ...]]:
    if found.old_max_concurrency or found.old_dynamic:
        raise InvalidArgumentError("-c and -d are old: use --concurrency-range START:END, with -l for a limit")
    given = [
        name
        for name in ("concurrency_range", "request_rate_range", "request_intervals", "periodic_concurrency_range")
        if getattr(found, name)
    ]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise InvalidArgumentError(f"{flags} cannot be used together")
    if found.request_rate_range:
        return Mode.REQUEST_RATE, parse_range(found.request_rate_range, "--request-rate-range", is_whole=False), ()
    if found.request_intervals:
        return Mode.INTERVALS, LoadRange(1), read_intervals(found.request_intervals)
    if found.periodic_concurrency_range:
        flag = "--periodic-concurrency-range"
        return Mode.PERIODIC, parse_range(found.periodic_concurrency_range, flag, is_whole=True), ()
    text = found.concurrency_range or str(found.old_concurrency or 1)
    return Mode.CONCURRENCY, parse_range(text, "--concurrency-range", is_whole=True), ()


def read_intervals(path: Path) -> tuple[int, ...]:
    """Nanoseconds, from a file of microseconds by line. Raises InvalidArgumentError."""
    try:
        lines = path.read_bytes().split()
    except OSError as error:
        raise InvalidArgumentError(f"--request-intervals: cannot read '{path}': {error.strerror}") from None
    try:
        intervals = tuple(round(float(line) * 1000) for line in lines)
    except (ValueError, OverflowError):
        intervals = ()
    if not intervals or min(intervals) < 0 or not sum(intervals):
        raise InvalidArgumentError(f"--request-intervals: '{path}' must have numbers of microseconds, one on each line")
    return intervals


def _sequences(found: argparse.Namespace) -> Sequences:
    first, colon, end = found.sequence_id_range.partition(":")
    if not is_digits(first) or (colon and not is_digits(end)) or (end and int(end) <= int(first)):
        raise InvalidArgumentError(
            f"--sequence-id-range expects <start> or <start:end>, got '{found.sequence_id_range}'"
        )
    has_data = any(source not in (RANDOM, ZERO) for source in found.input_data)
    length = found.sequence_length or (None if has_data else DEFAULT_SEQUENCE_LENGTH)
    return Sequences(int(first), int(end) if end else None, length, found.sequence_length_variation)


def _measurement(found: argparse.Namespace) -> MeasurementOptions:
    if found.percentile != -1 and not 0 < found.percentile < 100:
        raise InvalidArgumentError(f"--percentile expects a number between 0 and 100, got {found.percentile:g}")
    if found.binary_search and not found.latency_threshold:
        raise InvalidArgumentError("--binary-search looks for where a latency is passed: say which with -l")
    return MeasurementOptions(
        counts_requests=found.measurement_mode == "count_windows",
        interval_s=found.measurement_interval / 1000,
        window_requests=found.measurement_request_count,
        max_trials=found.max_trials,
        stability=Stability(
            percentage=found.stability_percentage,
            percentile=None if found.percentile == -1 else found.percentile,
            latency_limit_us=found.latency_threshold * 1000.0,
        ),
        num_warmup_requests=found.warmup_request_count,
        num_requests=found.request_count,
    )


def _request(found: argparse.Namespace) -> RequestOptions:
    sources = list(found.input_data)
    if found.is_zero:
        sources.append(ZERO)
    if found.data_directory:
        sources.append(found.data_directory)
    if len(sources) > 1 and any(source in (RANDOM, ZERO) or Path(source).is_dir() for source in sources):
        raise InvalidArgumentError("--input-data may be repeated for JSON files only")
    if found.input_tensor_format == "json" and found.protocol == "grpc":
        raise InvalidArgumentError("--input-tensor-format json is of HTTP; gRPC has binary tensors")
    return RequestOptions(
        data=DataOptions(
            sources=tuple(sources) or (RANDOM,),
            shapes=dict(_shape(text) for text in found.shape),
            batch_size=found.batch_size,
            string_length=found.string_length,
            string_data=found.string_data,
            seed=found.seed,
        ),
        headers=_headers(found.headers),
        parameters=dict(_parameter(text) for text in found.request_parameter),
        is_input_json=found.input_tensor_format == "json",
        is_output_json=found.output_tensor_format == "json",
        algorithm=found.grpc_compression_algorithm,
        frame_bytes=found.grpc_max_frame_size,
        shared_memory=SharedMemory(found.shared_memory),
        output_region_bytes=found.output_shared_memory_size,
    )


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, sizes = text.rpartition(":")
    parts = sizes.split(",")
    if not colon or not name or not all(is_digits(part.strip()) for part in parts):
        raise InvalidArgumentError(f"--shape expects <name>:<size>,<size>,..., got '{text}'")
    return name, tuple(int(part) for part in parts)


def _headers(texts: Sequence[str]) -> dict[str, str]:
    """The headers of -H, and the API key of the environment unless -H sets one."""
    headers = dict(_header(text) for text in texts)
    if {"authorization", "x-api-key"} & {name.lower() for name in headers}:
        return headers
    return headers | environment_headers()


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise InvalidArgumentError(f"-H expects <name>:<value>, got '{text}'")
    return name.strip(), value.strip()


def _parameter(text: str) -> tuple[str, Parameter]:
    name, _, rest = text.partition(":")
    value, _, kind = rest.rpartition(":")
    if name and kind == "bool" and value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    if name and kind in ("int", "uint") and is_digits(value.removeprefix("-")):
        return name, int(value)
    if name and kind == "string":
        return name, value
    raise InvalidArgumentError(f"--request-parameter expects <name>:<value>:<bool|int|string>, got '{text}'")


def _metrics(found: argparse.Namespace) -> MetricsOptions:
    text = found.metrics_url.partition("://")[2] or found.metrics_url
    host, slash, path = text.partition("/")
    scheme = "https://" if found.metrics_url.startswith("https://") else ""
    return MetricsOptions(
        is_collected=found.collect_metrics,
        address=parse_address(scheme + host, default_port=METRICS_PORT),
        path=slash + path or "/metrics",
        interval_s=found.metrics_interval / 1000,
    )
