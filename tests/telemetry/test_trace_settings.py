"""The flag of tracing, and W3C trace contexts."""

from __future__ import annotations

import pytest

from modelserver.errors import InvalidArgumentError
from modelserver.telemetry.otel import parse_context
from modelserver.telemetry.trace_settings import parse_trace_config

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_flags_of_both_modes() -> None:
    options = parse_trace_config(["triton,file=f", "level=TIMESTAMPS", "rate=2", "count=3", "triton,log-frequency=4"])
    assert (options.mode, options.file) == ("triton", "f")
    start = options.start
    assert (start.levels, start.rate, start.count, start.log_frequency) == (frozenset({"TIMESTAMPS"}), 2, 3, 4)
    options = parse_trace_config(
        ["mode=opentelemetry", "opentelemetry,url=http://c/v1", "opentelemetry,resource=a=b=c", "level=OFF"]
    )
    assert (options.mode, options.url, options.start.levels) == ("opentelemetry", "http://c/v1", frozenset())
    assert options.resource == {"service.name": "modelserver", "a": "b=c"}
    options = parse_trace_config(["mode=opentelemetry", "rate=0", "opentelemetry,bsp_schedule_delay=0"])
    assert (options.start.rate, options.bsp_schedule_delay_ms) == (0, 0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rate", "option format is"),
        ("rates=1", "did you mean 'rate'"),
        ("file=x", "triton,file"),
        ("mode=x", "triton or opentelemetry"),
        ("rate=-1", "at least 0"),
        ("count=-2", "at least -1"),
        ("level=LOUD", "must be one of"),
        ("opentelemetry,protocol=udp", "http/protobuf or grpc"),
        ("opentelemetry,sampler=traceidratio:2", "with :RATIO from 0 to 1"),
        ("opentelemetry,sampler=alwayson", "did you mean 'always_on'"),
    ],
)
def test_what_is_no_setting_is_refused(text: str, part: str) -> None:
    with pytest.raises(InvalidArgumentError, match=part):
        parse_trace_config([text])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE, SPAN)),
        (f"cc-{TRACE}-{SPAN}-00-what-else", (TRACE, SPAN)),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE[:-1]}g-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
    ],
)
def test_contexts_are_checked(text: str, found: tuple[str, str] | None) -> None:
    assert parse_context(text) == found
