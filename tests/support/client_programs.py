"""gRPC clients of other languages: programs in `tests/clients/` that exercise `test.Wire` and print what they found.

Each prints a line of JSON per check, {"name": ..., "found": ...}, and all find the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tools import GO_LIBRARIES, JAVA_LIBRARIES, tool

_CLIENTS = Path(__file__).parent.parent / "clients"
# What grpc-java is made of; netty-tcnative brings ALPN.
_JARS = ("grpc-", "netty-", "guava", "perfmark-api", "jsr305", "opencensus-api")
_SIZES = (0, 1, 16379, 65536, 1 << 20, 64 << 20)
EXPECTED: dict[str, Any] = {
    **{f"unary {size}": True for size in _SIZES},
    "many": True,
    "chat": True,
    "count": 1000,
    "sum": f"1000 {sum(len(f'message {number}') for number in range(1000))}",
    "late": [1, 9, "too late: 100 % \n é 漢"],
    "error": [5, "100 % é漢\nend"],
    "unknown": 12,
    "deadline": 4,
    "cancelled": 1,
    "metadata": ["a value", [0, 1, 254, 255]],
    "gzip": True,
}


def run_node(package: str, program: str, *arguments: str) -> dict[str, Any]:
    """What a program of JavaScript finds by a package, which the test has asked for by its mark."""
    environment = {**os.environ, "NODE_PATH": f"{tool(package)}/node_modules"}
    command = [tool("node"), str(_CLIENTS / "node" / program), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {line["name"]: line["found"] for line in map(json.loads, ended.stdout.splitlines())}


PROGRAMS = [
    pytest.param("grpc-go", marks=pytest.mark.tool("go", "grpc-go")),
    pytest.param("grpc-java", marks=pytest.mark.tool("java", "javac", "grpc-java", "netty-tcnative")),
    pytest.param("grpc-js", marks=pytest.mark.tool("node", "grpc-js")),
]


class ClientProgram:
    """One of them, built. `directory` is empty."""

    def __init__(self, name: str, directory: Path) -> None:
        self._environment = dict(os.environ)
        self._command = {"grpc-go": self._go, "grpc-java": self._java, "grpc-js": self._js}[name](directory)

    def found(self, server: str, certificate: Path | None = None) -> dict[str, Any]:
        """What the program finds at HOST:PORT, by check; over TLS where an authority's certificate is given."""
        command = [*self._command, server, *([str(certificate)] if certificate is not None else [])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=self._environment, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return {line["name"]: line["found"] for line in map(json.loads, ended.stdout.splitlines())}

    def _go(self, directory: Path) -> Sequence[str]:
        built = directory / "grpc_go"
        self._environment |= {"GO111MODULE": "off", "GOPATH": f"{directory}:{GO_LIBRARIES}", "GOFLAGS": ""}
        self._build(tool("go"), "build", "-o", str(built), str(_CLIENTS / "go" / "grpc_go.go"))
        return (str(built),)

    def _java(self, directory: Path) -> Sequence[str]:
        jars = [str(jar) for jar in Path(JAVA_LIBRARIES).glob("*.jar") if jar.stem.startswith(_JARS)]
        path = ":".join([*jars, str(directory)])
        source = _CLIENTS / "java" / "GrpcJava.java"
        self._build(tool("javac"), "-proc:none", "-d", str(directory), "-cp", path, str(source))
        # Debian's Netty finds no ALPN in Java's own TLS, and tcnative not under the name that it has there.
        shutil.copy(tool("netty-tcnative"), directory / "libnetty_tcnative.so")
        return (tool("java"), f"-Djava.library.path={directory}", "-cp", path, "GrpcJava")

    def _js(self, _directory: Path) -> Sequence[str]:
        self._environment["NODE_PATH"] = f"{tool('grpc-js')}/node_modules"
        return (tool("node"), str(_CLIENTS / "node" / "grpc_js.js"))

    def _build(self, *command: str) -> None:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=self._environment, check=False)
        assert ended.returncode == 0, ended.stderr
