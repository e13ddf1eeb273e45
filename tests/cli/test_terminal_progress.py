"""Progress on a real terminal, and none where there is no terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.model_files import write_identity
from support.onnx_models import identity_model
from support.terminal import run_on_terminal

HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
ERASE_LINE = b"\x1b[2K"


def test_tune_shows_what_it_measures_now(tmp_path: Path) -> None:
    write_identity(tmp_path / "repo", "quick", max_batch_size=0)
    shown = run_on_terminal(
        *("tune", "quick", "--model-repository", tmp_path / "repo", "--shape", "INPUT0:2", "--instances", "1"),
        *("--concurrency", "2", "--window-ms", "250", "-o", tmp_path / "best.pbtxt"),
    )
    assert shown.status == 0, shown.text
    for step in ("starting a server ...", "setting 1 (of 1 at most): 1 instance", "; 2 in flight ...", "comparing the"):
        assert step in shown.text
    # The line of progress is drawn over itself, and gone at the end.
    assert shown.raw.count(HIDE_CURSOR) == shown.raw.count(SHOW_CURSOR) == 1
    assert ERASE_LINE in shown.raw.rpartition(b"...")[2]
    assert "RANK" in shown.output
    assert "\x1b" not in shown.output


@pytest.mark.tool("tensorrt_rtx")
def test_build_engine_shows_a_bar(tmp_path: Path) -> None:
    onnx = identity_model(tmp_path / "m", ["n", 4]) / "1" / "model.onnx"
    words = ("build-engine", onnx, "--batch", "1/2/4")
    shown = run_on_terminal(*words)
    assert shown.status == 0, shown.text
    shares = [int(share) for share in re.findall(r"(\d+)%", shown.text)]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert "━" in shown.text
    assert "profile 0: x:1x4/2x4/4x4" in shown.output
    assert run_on_terminal(*words, "--json").raw == b""
    piped = subprocess.run([sys.executable, "-m", "modelserver", *map(str, words)], capture_output=True, check=False)
    assert (piped.returncode, piped.stderr) == (0, b"")
