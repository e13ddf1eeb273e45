"""All of h2spec, where it is found: a second opinion on RFC 9113 and 7541, from somebody else's hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import Authority
from support.tools import run_tool
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import Http2Limits, WireLimits
from modelserver.wire.tls import TlsFiles

pytestmark = pytest.mark.tool("h2spec")

# h2spec takes a HEADERS frame of 20 kB for one that is too large, whatever the server has announced.
LIMITS = WireLimits(http2=Http2Limits(max_frame_bytes=1 << 14))


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=["plain", "tls"])
def port(request: pytest.FixtureRequest, loop: str, tmp_path: Path) -> Iterator[tuple[RunningWire, list[str]]]:
    """A port, and h2spec's arguments to reach it."""
    if request.param == "plain":
        with running_wire(loop=loop, limits=LIMITS) as running:
            yield running, []
    else:
        pair = Authority(tmp_path).pair("server")
        with running_wire(loop=loop, limits=LIMITS, tls=TlsFiles(str(pair.certificate), str(pair.key))) as running:
            yield running, ["--tls", "--insecure"]


def test_h2spec(port: tuple[RunningWire, list[str]]) -> None:
    wire, how = port
    host, number = wire.address
    where = ("--host", host, "--port", str(number), "--path", "/size/100", *how)
    printed = run_tool("h2spec", "--strict", *where, statuses=(0, 1)).decode()
    counts = re.search(r"(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed", printed)
    assert counts is not None, printed
    assert int(counts[1]) >= 147
    assert int(counts[3]) == 0
    assert int(counts[4]) == 0, printed
    wire.expect_idle()
