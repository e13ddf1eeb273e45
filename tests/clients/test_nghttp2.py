"""nghttp2's tools: nghttp, and h2load with header tables and windows of every size. They check all that comes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.raw_http2 import prefixed
from support.tools import run_tool
from support.wires import RunningWire

GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")


def h2load(*arguments: str) -> None:
    """A thousand requests over four connections: all succeed."""
    shown = run_tool("h2load", "-n", "1000", "-c", "4", "-m", "10", *arguments).decode()
    found = re.search(r"requests: (\d+) total, .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", shown)
    assert found is not None, shown
    assert found.groups() == ("1000", "1000", "0", "0", "0"), shown
    assert "1000 2xx, 0 3xx, 0 4xx, 0 5xx" in shown


@pytest.mark.tool("h2load")
@pytest.mark.parametrize("table", [0, 100, 4096, 65536])
def test_header_tables(wire: RunningWire, table: int) -> None:
    h2load(f"--header-table-size={table}", f"--encoder-header-table-size={table}", f"http://{wire.url}/size/100")


@pytest.mark.tool("h2load")
@pytest.mark.parametrize("bits", [1, 10, 16, 30])
def test_windows(wire: RunningWire, bits: int) -> None:
    h2load("-w", str(bits), "-W", str(max(bits, 16)), f"http://{wire.url}/size/{10 * 2 ** min(bits, 14)}")


@pytest.mark.tool("h2load")
@pytest.mark.parametrize("size", [0, 16, 16379, 16380, 100_000])
def test_grpc(wire: RunningWire, tmp_path: Path, size: int) -> None:
    (tmp_path / "message").write_bytes(prefixed(bytes(size)))
    h2load("-d", str(tmp_path / "message"), *GRPC, f"http://{wire.url}/test.Wire/Echo")


@pytest.mark.tool("h2load")
def test_http1(wire: RunningWire) -> None:
    h2load("--h1", f"http://{wire.url}/size/100")


@pytest.mark.tool("h2load")
@pytest.mark.parametrize("protocols", ["h2", "http/1.1"])
def test_tls(tls_wire: RunningWire, protocols: str) -> None:
    h2load(f"--npn-list={protocols}", f"https://{tls_wire.url}/size/1000")


@pytest.mark.tool("nghttp")
def test_nghttp(wire: RunningWire, tmp_path: Path) -> None:
    """It begins with a tree of priorities on idle streams."""
    assert run_tool("nghttp", f"http://{wire.url}/size/100000") == bytes(100_000)
    (tmp_path / "body").write_bytes(b"abc" * 50_000)
    arguments = ("--padding=100", "-d", str(tmp_path / "body"), f"http://{wire.url}/echo")
    assert run_tool("nghttp", *arguments) == b"abc" * 50_000


@pytest.mark.tool("nghttp")
def test_nghttp_shows_no_error(wire: RunningWire) -> None:
    shown = run_tool("nghttp", "-nv", "-m", "20", "--window-bits=10", f"http://{wire.url}/size/5000").decode()
    assert "GOAWAY" not in shown.split("send GOAWAY")[0]
    assert "RST_STREAM" not in shown
    assert shown.count(":status: 200") == 20
