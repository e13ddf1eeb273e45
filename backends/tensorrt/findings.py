"""The findings of `modelserver doctor` about TensorRT on this machine. Imports nothing that could fail."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from modelserver.backend import Finding, FindingLevel

from .driver import driver_version, find_problem
from .runtime import PACKAGES

# Distributions that bring a library, by the module.
_DISTRIBUTIONS = {
    "tensorrt": ("tensorrt", "tensorrt_cu13", "tensorrt_cu12"),
    "tensorrt_rtx": ("tensorrt_rtx_cu13", "tensorrt_rtx_cu12", "tensorrt_rtx"),
    "tensorrt_lean": ("tensorrt_lean", "tensorrt_lean_cu13", "tensorrt_lean_cu12"),
    # Installed alone, as from a directory of wheels.
    "tensorrt_bindings": ("tensorrt_cu13_bindings", "tensorrt_cu12_bindings"),
    "tensorrt_rtx_bindings": ("tensorrt_rtx_cu13_bindings", "tensorrt_rtx_cu12_bindings"),
    "tensorrt_lean_bindings": ("tensorrt_lean_cu13_bindings", "tensorrt_lean_cu12_bindings"),
}


def find_state() -> tuple[Finding, ...]:
    """The driver, the libraries, and PyTorch, whose memory TensorRT uses."""
    problem = find_problem()
    libraries = {module: _version(module) for module in _DISTRIBUTIONS if _is_there(module)}
    if problem:
        # Many machines have no GPU and want none: nothing is wrong with them.
        installed = f"; installed: {_listed(libraries)}" if libraries else ""
        return (Finding(FindingLevel.OK, "tensorrt", f"models of this backend cannot run here: {problem}{installed}"),)
    version = driver_version()
    findings = [
        Finding(
            FindingLevel.OK,
            "tensorrt: driver",
            f"a GPU, and a driver for CUDA {version // 1000}.{version % 1000 // 10}",
        )
    ]
    if libraries:
        findings.append(Finding(FindingLevel.OK, "tensorrt: library", _listed(libraries)))
    else:
        advice = "; or ".join(PACKAGES.values())
        findings.append(Finding(FindingLevel.WARNING, "tensorrt: library", "neither TensorRT is installed", advice))
    return (*findings, *_torch_findings(is_wanted=bool(libraries)))


def _is_there(module: str) -> bool:
    """Of a library and its bindings one counts."""
    package = module.removesuffix("_bindings")
    is_shown = package != module and importlib.util.find_spec(package) is not None
    return not is_shown and importlib.util.find_spec(module) is not None


def _torch_findings(*, is_wanted: bool) -> tuple[Finding, ...]:
    if not is_wanted:
        return ()
    if importlib.util.find_spec("torch") is None:
        found = "PyTorch, whose memory TensorRT uses, is not installed"
        return (Finding(FindingLevel.PROBLEM, "tensorrt: torch", found, "pip install 'modelserver-py[tensorrt]'"),)
    version = _distribution_version("torch") or "of unknown version"
    if version.endswith("+cpu"):
        advice = "install a build with CUDA (https://pytorch.org/get-started)"
        return (Finding(FindingLevel.PROBLEM, "tensorrt: torch", f"PyTorch {version} cannot use a GPU", advice),)
    return (Finding(FindingLevel.OK, "tensorrt: torch", f"PyTorch {version}"),)


def _listed(libraries: dict[str, str]) -> str:
    return ", ".join(f"{module} {version}" for module, version in libraries.items())


def _version(module: str) -> str:
    found = (_distribution_version(name) for name in _DISTRIBUTIONS[module])
    return next((version for version in found if version), "of unknown version")


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
