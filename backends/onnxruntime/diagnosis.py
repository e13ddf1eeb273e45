"""Checks this machine for the onnxruntime backend. Imports ONNX Runtime only when asked."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence

from modelserver.backend import Finding, FindingLevel

# Distributions that install the same package `onnxruntime`: the one that was installed last wins, file by file.
RIVALS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-directml",
    "onnxruntime-migraphx",
    "onnxruntime-rocm",
    "onnxruntime-qnn",
)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def diagnose_distributions(version_of: Callable[[str], str | None] = installed_version) -> Finding:
    """Whether one distribution brings ONNX Runtime, or several do, which overwrite each other's files."""
    found = {name: version for name in RIVALS if (version := version_of(name)) is not None}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Finding(
            FindingLevel.WARNING,
            "onnxruntime",
            "not installed: ONNX models cannot be served",
            "pip install 'modelserver-py[onnx]', or onnxruntime-gpu for NVIDIA GPUs",
        )
    if len(found) > 1:
        keep = "onnxruntime-gpu" if "onnxruntime-gpu" in found else next(reversed(found))
        return Finding(
            FindingLevel.PROBLEM,
            "onnxruntime",
            f"{listed} are installed, and overwrite each other's files: which providers there are is chance",
            f"pip uninstall -y {' '.join(found)} && pip install {keep}",
        )
    return Finding(FindingLevel.OK, "onnxruntime", listed)


def diagnose_providers(distribution: Finding, has_gpu: bool) -> Sequence[Finding]:
    """The devices that the installed library supports, if it can be imported."""
    if distribution.level is FindingLevel.WARNING:
        return ()
    try:
        library = importlib.import_module("onnxruntime")
        providers = library.get_available_providers()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return (
            Finding(
                FindingLevel.PROBLEM,
                "onnxruntime",
                f"cannot be imported: {type(error).__name__}: {error}",
                "reinstall it: pip install --force-reinstall onnxruntime",
            ),
        )
    shown = f"ONNX Runtime {library.__version__} with {', '.join(providers)}"
    if has_gpu and "CUDAExecutionProvider" not in providers:
        return (
            Finding(
                FindingLevel.WARNING,
                "onnxruntime providers",
                f"{shown}: there is a GPU, and no provider for it",
                "pip uninstall -y onnxruntime && pip install onnxruntime-gpu",
            ),
        )
    return (Finding(FindingLevel.OK, "onnxruntime providers", shown),)
