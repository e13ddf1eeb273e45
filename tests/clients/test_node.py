"""Node's own HTTP/2 client: nghttp2, strict about every header block."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.tools import tool
from support.wires import RunningWire

SCRIPT = Path(__file__).parent / "node" / "http2.js"


@pytest.mark.tool("node")
def test_http2(wire: RunningWire) -> None:
    """With header tables and windows of every size, a thousand requests over each connection."""
    ended = subprocess.run(
        [tool("node"), str(SCRIPT), wire.url], capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == 7
    for line in found:
        assert {name: value for name, value in line.items() if name != "settings"} == {
            "many": True,
            "echoed": True,
            "pieces": True,
            "missing": 404,
        }, line
