"""A repository may be mounted read-only: the server reads it, whatever the backend, and leaves no trace in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from support.clients import HttpClient
from support.serving import running_server


def _tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory with its size and time of change."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [root, *root.rglob("*")]}


def test_serving_writes_nothing_into_the_repository(tmp_path: Path, model_repository: Path) -> None:
    for name in ("add_sub", "digits_onnx", "digits_torchscript", "digits_export", "identity"):
        shutil.copytree(
            model_repository / name, tmp_path / "models" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    before = _tree(tmp_path / "models")
    with running_server(tmp_path / "models") as running, HttpClient(running) as client:
        four = np.ones(4, np.float32)
        assert client.infer("add_sub", {"INPUT0": four, "INPUT1": four})["OUTPUT0"].tolist() == [2, 2, 2, 2]
        for name in ("digits_onnx", "digits_torchscript", "digits_export"):
            client.infer(name, {"image": np.zeros((1, 8, 8), np.float32)})
    assert _tree(tmp_path / "models") == before
