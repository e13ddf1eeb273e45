"""What the doctor hears of ONNX Runtime."""

from __future__ import annotations

import pytest
from modelserver_backends.onnxruntime.diagnosis import diagnose_distributions, diagnose_providers

from modelserver.backend import Finding, FindingLevel
from modelserver.backend.discovery import find_backend


@pytest.mark.parametrize(
    ("installed", "level", "advice"),
    [
        ({}, FindingLevel.WARNING, "pip install 'modelserver-py[onnx]', or onnxruntime-gpu for NVIDIA GPUs"),
        ({"onnxruntime": "1"}, FindingLevel.OK, ""),
        (
            {"onnxruntime": "1.31", "onnxruntime-gpu": "1.30"},
            FindingLevel.PROBLEM,
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu",
        ),
    ],
)
def test_two_distributions_in_one_place_are_a_problem(installed: dict, level: FindingLevel, advice: str) -> None:
    finding = diagnose_distributions(installed.get)
    assert (finding.level, finding.advice) == (level, advice)
    assert all(f"{name} {version}" in finding.found for name, version in installed.items())


def test_a_gpu_without_a_provider_is_a_warning() -> None:
    there = Finding(FindingLevel.OK, "onnxruntime", "")
    (finding,) = diagnose_providers(there, has_gpu=True)
    assert (finding.level, finding.advice[:13]) == (FindingLevel.WARNING, "pip uninstall")
    assert diagnose_providers(Finding(FindingLevel.WARNING, "onnxruntime", ""), has_gpu=True) == ()


def test_a_library_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    (finding,) = diagnose_providers(Finding(FindingLevel.OK, "onnxruntime", ""), has_gpu=False)
    assert finding.level is FindingLevel.PROBLEM


def test_here_all_is_well() -> None:
    assert {finding.level for finding in find_backend("onnxruntime").diagnose()} == {FindingLevel.OK}
