"""The steps that need a GPU, on a machine without one: they import what exists, and end before CUDA."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest
from gpu.__main__ import HERE, run_here, step_names


@pytest.mark.parametrize("path", sorted(HERE.glob("*.py")), ids=lambda path: path.stem)
def test_what_the_steps_import_exists(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and importlib.util.find_spec(node.module.partition(".")[0]):
            module = importlib.import_module(node.module)
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
