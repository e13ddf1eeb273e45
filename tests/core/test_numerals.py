"""Numbers in text: one way to write them, wherever clients, operators and authors of models do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelserver.core.numerals import is_digits, parse_float, parse_int

# What Python's own `int` or `float` read, and nothing else does.
FOREIGN = ("1_000", "1__0", "\u0661", "\uff11", "1\u0662", "\u00b2", "1\u2003", "\x1c1")


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("+7", 7), ("-12", -12), (" 3\n", 3), ("9" * 40, int("9" * 40))]
)
def test_whole_numbers(text: str, number: int) -> None:
    assert parse_int(text) == number


@pytest.mark.parametrize("text", [*FOREIGN, "", " ", "+", "1.0", "0x1", "1e3", "- 1", "9" * 5000])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a whole number|Exceeds the limit"):
        parse_int(text)


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0.0), (".5", 0.5), ("5.", 5.0), ("-1.25", -1.25), (" 1e3 ", 1000.0), ("+2E-1", 0.2)]
)
def test_numbers(text: str, number: float) -> None:
    assert parse_float(text) == number


@pytest.mark.parametrize("text", [*FOREIGN, "", ".", "1e", "nan", "inf", "-Infinity", "1e999", "0x1p1", "1_0.5", "1,5"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="not a number"):
        parse_float(text)


@pytest.mark.parametrize("text", [*FOREIGN, "", "+1", "-1", " 1", "1" * 19])
def test_what_is_not_digits(text: str) -> None:
    assert not is_digits(text)


def test_digits() -> None:
    assert is_digits("0")
    assert is_digits("9" * 18)
    assert not is_digits("1234567", 6)


def _option(text: str) -> Any:
    from modelserver.options.sources import parse_arguments

    return parse_arguments([f"--http-port={text}"])


def _quota(text: str) -> Any:
    from modelserver.auth.caller_limits import parse_limits_flag

    return parse_limits_flag("--caller-limits", f"concurrent={text}")


def _gpu(text: str) -> Any:
    from modelserver.config.resources import parse_gpu_limits

    return parse_gpu_limits([f"0:{text}"])


def _cores(text: str) -> Any:
    from modelserver.config.resources import parse_cores

    return parse_cores(text)


def _version(text: str) -> Any:
    from modelserver.frontends.http.inference import parse_version

    return parse_version("m", text)


def _grpc_version(text: str) -> Any:
    from modelserver.frontends.grpc.head import decode_version

    return decode_version(text)


def _timeout(text: str) -> Any:
    from modelserver.wire.http2.head import parse_timeout

    return parse_timeout(text.encode() + b"m")


def _trace_rate(text: str) -> Any:
    from modelserver.telemetry.trace_settings import parse_number

    return parse_number("trace_rate", text)


def _keep_alive(text: str) -> Any:
    from modelserver.config.on_demand import parse_keep_alive

    return parse_keep_alive(text)


@pytest.mark.parametrize("text", FOREIGN[:4])
@pytest.mark.parametrize(
    "read",
    [_option, _quota, _gpu, _cores, _version, _grpc_version, _timeout, _trace_rate, _keep_alive],
)
def test_no_reader_takes_what_only_python_takes(read: Callable[[str], Any], text: str) -> None:
    from modelserver.errors import ServerError

    with pytest.raises((ServerError, ValueError)):
        read(text)


def test_no_weight_of_an_encoding_either() -> None:
    from modelserver.protocol.compression import choose_encoding

    assert choose_encoding("gzip;q=1") == "gzip"
    assert all(choose_encoding(f"gzip;q={text}") is None for text in FOREIGN)
