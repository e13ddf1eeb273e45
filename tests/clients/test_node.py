"""Node: its own HTTP/2 client (nghttp2, strict about every header block), and @grpc/grpc-js on top of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.tools import tool
from support.wires import RunningWire

SCRIPTS = Path(__file__).parent / "node"


def run(script: str, wire: RunningWire, modules: str = "") -> list[dict[str, Any]]:
    """The JSON lines that a script prints."""
    environment = os.environ | {"NODE_PATH": modules}
    command = [tool("node"), str(SCRIPTS / script), wire.url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.tool("node")
def test_http2(wire: RunningWire) -> None:
    found = run("http2.js", wire)
    assert len(found) == 5
    for line in found:
        assert {key: line[key] for key in ("echoed", "pieces", "missing")} == {
            "echoed": True,
            "pieces": True,
            "missing": 404,
        }, line


@pytest.mark.tool("node", "grpc-js")
def test_grpc_js(wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    found = {line["name"]: line["found"] for line in run("grpc_js.js", wire, f"{tool('grpc-js')}/node_modules")}
    sizes = {name: value for name, value in found.items() if name.startswith("unary")}
    assert len(sizes) == 6
    assert all(sizes.values()), sizes
    assert {name: value for name, value in found.items() if name not in sizes} == {
        "many": True,
        "chat": True,
        "count": 1000,
        "sum": f"1000 {sum(len(f'message {number}') for number in range(1000))}",
        "metadata": ["a value", [0, 1, 254, 255]],
        "error": {"code": 5, "details": "100 % é漢\nend"},
        "late": [1, 9, "too late: 100 % \n é 漢"],
        "unknown": 12,
        "deadline": 4,
        "cancelled": 1,
        "gzip": True,
    }
    wire.until(lambda: wire.grpc.num_cancelled == before + 2, "both handlers were cancelled")
