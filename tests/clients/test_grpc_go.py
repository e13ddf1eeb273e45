"""grpc-go: a deadline per call, so that no header block is like another, and windows of 64 KiB that grow."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.tools import GO_LIBRARIES, tool
from support.wires import RunningWire

pytestmark = [pytest.mark.tool("go", "grpc-go"), pytest.mark.slow]

SOURCE = Path(__file__).parent / "go" / "grpc_go.go"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client, built."""
    directory = tmp_path_factory.mktemp("go")
    built = directory / "grpc_go"
    environment = os.environ | {"GO111MODULE": "off", "GOPATH": f"{directory}:{GO_LIBRARIES}", "GOFLAGS": ""}
    command = [tool("go"), "build", "-o", str(built), str(SOURCE)]
    subprocess.run(command, check=True, timeout=100, env=environment, capture_output=True)
    return built


def test_grpc_go(program: Path, wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    ended = subprocess.run([str(program), wire.url], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {line["name"]: line["found"] for line in map(json.loads, ended.stdout.splitlines())}
    sizes = {name: value for name, value in found.items() if name.startswith("unary")}
    assert len(sizes) == 6
    assert all(sizes.values()), sizes
    assert {name: value for name, value in found.items() if name not in sizes} == {
        "many": True,
        "chat": True,
        "count": 1000,
        "sum": f"1000 {sum(len(f'message {number}') for number in range(1000))}",
        "late": [1, 9, "too late: 100 % \n é 漢"],
        "error": [5, "100 % é漢\nend"],
        "unknown": 12,
        "deadline": True,
        "cancelled": True,
        "metadata": ["a value", [0, 255]],
        "gzip": True,
    }
    wire.until(lambda: wire.grpc.num_cancelled == before + 2, "both handlers were cancelled")
