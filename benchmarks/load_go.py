"""Load by grpc-go (`load_go.go`), built on first use from Debian's packages: golang-go and golang-google-grpc-dev."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.load import Load, LoadResult, run_load

_SOURCE = Path(__file__).with_suffix(".go")
# Where Debian keeps Go libraries; they are built with, and without modules.
_LIBRARIES = "/usr/share/gocode"
# `go build` takes its time, and the program is the same for every run.
_BUILT = Path(__file__).parent.parent / ".bench" / "load_go"


def run_go(load: Load, port: int) -> LoadResult:
    """Run the load against 127.0.0.1:`port`. Raises SystemExit without Go, or when a request failed."""
    return run_load(load, port, (str(_program()),))


@cache
def _program() -> Path:
    if _BUILT.is_file() and _BUILT.stat().st_mtime > _SOURCE.stat().st_mtime:
        return _BUILT
    go = shutil.which("go")
    if go is None or not Path(_LIBRARIES, "src/google.golang.org/grpc").is_dir():
        raise SystemExit("grpc-go is not installed; on Debian: apt-get install golang-go golang-google-grpc-dev")
    _BUILT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"GO111MODULE": "off", "GOPATH": f"{scratch}:{_LIBRARIES}", "GOFLAGS": ""}
        command = [go, "build", "-o", str(_BUILT), str(_SOURCE)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"grpc-go's load program was not built:\n{done.stderr[-2000:]}")
    return _BUILT
