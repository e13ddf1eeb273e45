"""Which library is taken, by modules that have nothing but a name; and what is kept of a log."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
from modelserver_backends.tensorrt import findings
from modelserver_backends.tensorrt.plan import Flavour
from modelserver_backends.tensorrt.runtime import LogLines, find_library

from modelserver.backend import UnavailableError

NAMES = [name + suffix for name in ("tensorrt", "tensorrt_rtx", "tensorrt_lean") for suffix in ("", "_bindings")]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Only the modules that are named are there."""

    def install(*names: str) -> None:
        for name in NAMES:
            monkeypatch.setitem(sys.modules, name, None)
        for name in names:
            module = ModuleType(name)
            module.Runtime = object  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.mark.parametrize(
    ("installed", "flavour", "allow_lean", "taken"),
    [
        (["tensorrt", "tensorrt_bindings"], Flavour.TENSORRT, False, "tensorrt"),
        (["tensorrt_bindings"], Flavour.TENSORRT, False, "tensorrt_bindings"),
        (["tensorrt_lean", "tensorrt"], Flavour.TENSORRT, True, "tensorrt"),
        (["tensorrt_lean"], Flavour.TENSORRT, True, "tensorrt_lean"),
        (["tensorrt_rtx", "tensorrt"], Flavour.RTX, True, "tensorrt_rtx"),
    ],
)
def test_the_library_is_that_of_the_plan(install, installed, flavour, allow_lean, taken) -> None:
    install(*installed)
    assert find_library(flavour, allow_lean=allow_lean).__name__ == taken


@pytest.mark.parametrize(
    ("installed", "flavour", "said"),
    [
        ([], Flavour.TENSORRT, "TensorRT is not installed: pip install 'modelserver-py[tensorrt]'"),
        (["tensorrt"], Flavour.RTX, "TensorRT for RTX is not installed: pip install 'modelserver-py[tensorrt-rtx]'"),
        (["tensorrt_lean"], Flavour.TENSORRT, "TensorRT is not installed"),
    ],
)
def test_a_library_that_is_missing_is_named(install, installed, flavour, said) -> None:
    install(*installed)
    with pytest.raises(UnavailableError) as raised:
        find_library(flavour)
    assert said in raised.value.message


def test_another_package_of_that_name_is_none(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    with pytest.raises(UnavailableError, match=r"cannot be imported .tensorrt has no class Runtime"):
        find_library(Flavour.TENSORRT)


def test_a_library_that_is_broken_is_not_called_missing(install, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    install()
    monkeypatch.delitem(sys.modules, "tensorrt")
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnavailableError, match=r"is installed and cannot be imported .*libnvinfer\.so\.11"):
        find_library(Flavour.TENSORRT)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)


def test_the_doctor_sees_bindings_that_are_installed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tensorrt_rtx_bindings", "tensorrt", "tensorrt_bindings"}
    monkeypatch.setattr(findings, "find_problem", lambda: "")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
        found = {finding.subject: finding.found for finding in findings.find_state()}
    assert found["tensorrt: library"] == "tensorrt of unknown version, tensorrt_rtx_bindings of unknown version"


def test_the_reason_is_the_last_errors_of_the_call() -> None:
    lines = LogLines()
    lines.add("old", is_error=True)
    mark = lines.mark()
    assert lines.errors_since(mark) == "TensorRT says nothing"
    lines.add("beware", is_error=False)
    lines.add("it broke", is_error=True)
    lines.add("it broke", is_error=True)
    lines.add("IRuntime: Error Code 1: catchCudaError (cudaError 35)", is_error=True)
    thread = threading.Thread(target=lambda: lines.add("another's", is_error=True))
    thread.start()
    thread.join()
    assert lines.errors_since(mark) == "it broke"
    assert lines.warnings_since(mark) == ["beware"]
    later = lines.mark()
    thread = threading.Thread(target=lambda: lines.add("from a thread of the library", is_error=True))
    thread.start()
    thread.join()
    assert lines.errors_since(later) == "from a thread of the library"
