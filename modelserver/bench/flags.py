"""The flags of the bench: perf_analyzer's, by their names, and those of language models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from modelserver.bench.llm.arguments import add_llm_flags
from modelserver.core.numerals import parse_float, parse_int
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError
from modelserver.wire.http2.frame import DEFAULT_FRAME_BYTES, MAX_FRAME_BYTES

# Accepted so that perf_analyzer's command lines work; they have no effect here.
WITHOUT_EFFECT = {
    "model_signature_name": "it is of TensorFlow Serving",
    "trace_file": "traces are set on the server",
    "trace_level": "traces are set on the server",
    "trace_rate": "traces are set on the server",
    "trace_count": "traces are set on the server",
    "log_frequency": "traces are set on the server",
    "triton_server_directory": "the bench talks to a running server",
    "model_repository": "the bench talks to a running server",
    "ssl_https_client_certificate_type": "certificates are PEM",
    "ssl_https_private_key_type": "keys are PEM",
}


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and suggests a flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(message)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Raises InvalidArgumentError."""
        found, unknown = self.parse_known_args(list(words))
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = nearest_hint(name, known) if name.startswith("--") else ""
            raise InvalidArgumentError(f"unknown argument '{name}'{hint}")
        return found


def make_parser() -> Parser:
    """The parser, which has the help too."""
    parser = Parser(
        prog="modelserver bench",
        usage="modelserver bench -m MODEL [FLAG ...]",
        description="Measure a running server, in the manner of perf_analyzer and with its flags.",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 measured, 1 requests failed or nothing could be measured, 2 misused.",
    )
    _add_service(parser.add_argument_group("What is asked"))
    _add_load(parser.add_argument_group("Load"))
    _add_measurement(parser.add_argument_group("Measurement"))
    _add_data(parser.add_argument_group("Data"))
    _add_sequences(parser.add_argument_group("Sequences"))
    add_llm_flags(parser.add_argument_group("Language models"))
    _add_reports(parser.add_argument_group("Reports"))
    _add_tls(parser.add_argument_group("TLS"))
    _add_ignored(parser.add_argument_group("Accepted, without effect"))
    return parser


def _add_service(group: Any) -> None:
    group.add_argument("-h", "--help", action="store_true", help="Show this.")
    group.add_argument("--version", action="store_true", help="Show modelserver's version.")
    group.add_argument("-m", "--model", metavar="MODEL", help="Name of the model.")
    group.add_argument("-x", "--model-version", default="", metavar="VERSION", help="The newest without it.")
    group.add_argument(
        "-u",
        "--url",
        default="",
        metavar="HOST:PORT",
        help="MODELSERVER_URL, else localhost:8000, or :8001 with -i grpc.",
    )
    group.add_argument("-i", "--protocol", default="http", type=str.lower, choices=("http", "grpc"))
    group.add_argument("--streaming", action="store_true", help="gRPC's ModelStreamInfer.")
    group.add_argument("--service-kind", default="triton", metavar="triton")
    group.add_argument(
        "--bls-composing-models", default="", metavar="NAME[:VERSION],...", help="Show their statistics."
    )
    group.add_argument("-H", dest="headers", action="append", default=[], metavar="NAME:VALUE", help="Repeatable.")
    group.add_argument(
        "--request-parameter", action="append", default=[], metavar="NAME:VALUE:TYPE", help="bool, int or string."
    )
    group.add_argument("--grpc-compression-algorithm", default="none", choices=("none", "gzip", "deflate"))
    group.add_argument(
        "--grpc-max-frame-size",
        type=_frame_size,
        default=DEFAULT_FRAME_BYTES,
        metavar="BYTES",
        help="Largest frame that we accept (16384).",
    )
    group.add_argument("-a", "--async", dest="is_async", action="store_true", help="Accepted; requests always are.")
    group.add_argument("--sync", action="store_true", help="Accepted, see --async.")


def _add_load(group: Any) -> None:
    group.add_argument("--concurrency-range", metavar="START:END:STEP", help="Requests in flight (1).")
    group.add_argument("--request-rate-range", metavar="START:END:STEP", help="Requests per second, open loop.")
    group.add_argument("--request-distribution", default="constant", choices=("constant", "poisson"))
    group.add_argument("--request-intervals", type=Path, metavar="FILE", help="Microseconds between requests, by line.")
    group.add_argument("--periodic-concurrency-range", metavar="START:END:STEP", help="With --streaming and an export.")
    group.add_argument("--request-period", type=_count, default=10, metavar="RESPONSES", help="Before the next step.")
    group.add_argument("--binary-search", action="store_true", help="Halve the range to find the latency threshold.")
    group.add_argument("-l", "--latency-threshold", type=_count, default=0, metavar="MS")
    group.add_argument(
        "--max-threads", "--num-threads", type=_count, metavar="N", help="Load processes; default: half the CPUs."
    )
    group.add_argument(
        "--streams-per-connection",
        type=_count,
        default=6,
        metavar="N",
        help="Requests that share an HTTP/2 connection.",
    )
    group.add_argument("--max-connections", type=_count, default=1024, metavar="N", help="Of an open loop.")
    group.add_argument("--seed", type=_natural, default=0, metavar="N", help="Seed of random data and arrivals.")
    group.add_argument("-t", dest="old_concurrency", type=_count, help=argparse.SUPPRESS)
    group.add_argument("-c", dest="old_max_concurrency", type=_count, help=argparse.SUPPRESS)
    group.add_argument("-d", dest="old_dynamic", action="store_true", help=argparse.SUPPRESS)


def _add_measurement(group: Any) -> None:
    group.add_argument("--measurement-mode", default="time_windows", choices=("time_windows", "count_windows"))
    group.add_argument("-p", "--measurement-interval", type=_count, default=5000, metavar="MS")
    group.add_argument("--measurement-request-count", type=_count, default=50, metavar="N")
    group.add_argument("-s", "--stability-percentage", type=_positive, default=10.0, metavar="PERCENT")
    group.add_argument("-r", "--max-trials", type=_count, default=10, metavar="N")
    group.add_argument(
        "--percentile", type=float, default=-1, metavar="N", help="Use this percentile instead of the average."
    )
    group.add_argument("--warmup-request-count", type=_natural, default=0, metavar="N")
    group.add_argument(
        "--request-count", type=_natural, default=0, metavar="N", help="Measure exactly this many requests."
    )


def _add_data(group: Any) -> None:
    group.add_argument("-b", "--batch-size", type=_count, default=1, metavar="N")
    group.add_argument("--input-data", action="append", default=[], metavar="random|zero|PATH", help="Repeatable.")
    group.add_argument("--data-directory", help=argparse.SUPPRESS)
    group.add_argument("-z", dest="is_zero", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--shape", action="append", default=[], metavar="NAME:1,2,3", help="Of an input. Repeatable.")
    group.add_argument("--string-length", type=_count, default=128, metavar="N")
    group.add_argument("--string-data", default="", metavar="TEXT")
    group.add_argument("--input-tensor-format", default="binary", choices=("binary", "json"))
    group.add_argument("--output-tensor-format", default="binary", choices=("binary", "json"))
    group.add_argument("--shared-memory", default="none", choices=("none", "system", "cuda"))
    group.add_argument("--output-shared-memory-size", type=_count, default=102400, metavar="BYTES")


def _add_sequences(group: Any) -> None:
    group.add_argument(
        "--num-of-sequences", type=_count, default=4, metavar="N", help="Concurrent sequences, with a request rate."
    )
    group.add_argument("--sequence-length", type=_count, metavar="N", help="Default: 20, or the length of the data.")
    group.add_argument("--sequence-length-variation", type=_percent, default=20.0, metavar="PERCENT")
    group.add_argument("--sequence-id-range", default="1", metavar="START:END")
    group.add_argument("--serial-sequences", action="store_true", help="Accepted; a sequence always is.")


def _add_reports(group: Any) -> None:
    group.add_argument("-v", "--verbose", action="count", default=0)
    group.add_argument("-f", "--csv", type=Path, metavar="FILE", help="CSV report.")
    group.add_argument("--verbose-csv", action="store_true")
    group.add_argument("--profile-export-file", type=Path, metavar="FILE", help="Times of every request, as JSON.")
    group.add_argument("--json", nargs="?", const="-", default="", metavar="FILE", help="Results; standard output: -.")
    group.add_argument("--html", type=Path, metavar="FILE", help="A page with curves and tables.")
    group.add_argument(
        "--price-per-hour", type=_positive, default=0.0, metavar="PRICE", help="Of the machine: print cost per million."
    )
    group.add_argument("--collect-metrics", action="store_true", help="Collect GPU metrics from the server.")
    group.add_argument("--metrics-url", default="localhost:8002/metrics", metavar="URL")
    group.add_argument("--metrics-interval", type=_count, default=1000, metavar="MS")


def _add_tls(group: Any) -> None:
    group.add_argument("--ssl-grpc-use-ssl", nargs="?", const="true", default="false", metavar="BOOL")
    group.add_argument("--ssl-grpc-root-certifications-file", default="", metavar="FILE")
    group.add_argument("--ssl-grpc-private-key-file", default="", metavar="FILE")
    group.add_argument("--ssl-grpc-certificate-chain-file", default="", metavar="FILE")
    group.add_argument("--ssl-https-verify-peer", type=int, default=1, choices=(0, 1))
    group.add_argument("--ssl-https-verify-host", type=int, default=2, choices=(0, 1, 2))
    group.add_argument("--ssl-https-ca-certificates-file", default="", metavar="FILE")
    group.add_argument("--ssl-https-client-certificate-file", default="", metavar="FILE")
    group.add_argument("--ssl-https-private-key-file", default="", metavar="FILE")


def _add_ignored(group: Any) -> None:
    for name, reason in WITHOUT_EFFECT.items():
        group.add_argument("--" + name.replace("_", "-"), metavar="...", help=f"{reason[0].upper()}{reason[1:]}.")


def _number(text: str, least: float, kind: type[int] | type[float]) -> float:
    try:
        number = parse_int(text) if kind is int else parse_float(text)
    except ValueError:
        number = None
    if number is None or number < least:
        noun = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"expected {noun} of at least {least:g}, got '{text}'")
    return number


def _count(text: str) -> int:
    return int(_number(text, 1, int))


def _natural(text: str) -> int:
    return int(_number(text, 0, int))


def _positive(text: str) -> float:
    return _number(text, 0.001, float)


def _percent(text: str) -> float:
    return _number(text, 0, float)


def _frame_size(text: str) -> int:
    size = _count(text)
    if not DEFAULT_FRAME_BYTES <= size <= MAX_FRAME_BYTES:
        raise argparse.ArgumentTypeError(
            f"HTTP/2 has frames of {DEFAULT_FRAME_BYTES} to {MAX_FRAME_BYTES} bytes, got '{text}'"
        )
    return size
