"""The steps that need a GPU, on a machine without one: they import what exists, and end before CUDA."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from gpu import __main__ as driver
from gpu import wheelhouse
from gpu.__main__ import HERE, run_here, step_names


@pytest.mark.parametrize("path", sorted(HERE.glob("*.py")), ids=lambda path: path.stem)
def test_what_the_steps_import_exists(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and importlib.util.find_spec(node.module.partition(".")[0]):
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if error.name != "triton":  # only machines with a GPU have it
                    raise
                continue
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found.append(alias.name)
    assert found


@pytest.mark.tool("no-gpu")
@pytest.mark.parametrize("name", step_names())
def test_without_a_gpu_every_step_is_absent(name: str) -> None:
    outcome = run_here(name)
    assert outcome["verdict"] == "ABSENT", outcome
    assert outcome["reason"]


def test_a_wheelhouse_is_carried_in_parts(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    written = {f"{name}.whl": os.urandom(size) for name, size in (("one", 3000), ("two", 50_000), ("empty", 0))}
    for name, content in written.items():
        (tmp_path / "wheels" / name).write_bytes(content)
    parts = wheelhouse.split(tmp_path / "wheels", tmp_path / "parts", part_bytes=7000)
    assert len(parts) > 7
    assert max(part.stat().st_size for part in parts) <= 7000
    joined = wheelhouse.join(tmp_path / "parts", tmp_path / "joined")
    assert {path.name: path.read_bytes() for path in joined} == written
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part\.002 is not as it was written"):
        wheelhouse.join(tmp_path / "parts", tmp_path / "joined")
    parts[2].unlink()
    with pytest.raises(ValueError, match=r"part\.002 is missing"):
        wheelhouse.join(tmp_path / "parts", tmp_path / "joined")


def test_the_report_has_each_result_and_the_budget_ends_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, seen = tmp_path / "report.json", []

    def run(name: str, timeout_s: float) -> dict[str, Any]:
        seen.append((name, timeout_s, json.loads(report.read_text())["results"] if seen else []))
        return {"step": name, "verdict": "PASS", "seconds": 1.0, "facts": {}}

    monkeypatch.setattr(driver, "run_step", run)
    results = driver.run_all(["a", "b"], budget_s=100, report=report)
    assert [name for name, _, _ in seen] == ["a", "b"]
    assert all(0 < timeout_s <= 100 for _, timeout_s, _ in seen)
    assert seen[1][2] == results[:1]
    assert json.loads(report.read_text())["results"] == results
    (later,) = driver.run_all(["c"], budget_s=1, report=report)
    assert later["verdict"] == "LATER"
