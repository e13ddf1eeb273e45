"""The commands where there is no cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.ray_clusters import command, write_deployment


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    command("cluster", "status", status=1)
    assert "pip install 'modelserver-py[ray]'" in capsys.readouterr().err


def test_a_file_is_read_before_the_cluster_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_deployment(tmp_path / "deploy.yaml", 0, p={"repository": "m", "flags": ["--nothing"]})
    command("deploy", file, status=1)
    assert "pools[0]: 'flags[0]': unknown flag '--nothing'" in capsys.readouterr().err


def test_a_count_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    command("cluster", "scale", "p", "many", status=1)
    assert "expected a number of replicas or auto, got 'many'" in capsys.readouterr().err
