"""The functions behind `modelserver build-engine` and `modelserver inspect`, without a server or a config."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelserver.backend import InvalidArgumentError

from .build_options import BuildOptions, BuildRequest
from .builder import BuildResult, Progress, build_engine
from .engine import library_for
from .engine_info import EngineInfo, IoTensor, Range
from .onnx_file import OnnxFile, read_onnx
from .plan import PlanHeader, read_header
from .profiles import check_profile, derive_profile, parse_profile, parse_sizes, profile_text
from .sidecar import Sidecar, built_facts, file_sha256, read_sidecar, write_sidecar


@dataclass(frozen=True, slots=True)
class BuildCommand:
    """One `modelserver build-engine`. `profiles` and `sizes` are as they were typed; `batch` is "" if it was not."""

    onnx: Path
    output: Path
    options: BuildOptions
    profiles: Sequence[str] = ()
    batch: str = ""
    sizes: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """The result."""

    plan: Path
    sidecar: Path
    header: PlanHeader
    result: BuildResult


def plan_profiles(command: BuildCommand, onnx: OnnxFile) -> tuple[Mapping[str, Range], ...]:
    """The profiles that were typed, checked; else one from the sizes. Raises ConfigError, InvalidArgumentError."""
    if command.profiles:
        if command.batch or command.sizes:
            raise InvalidArgumentError("--profile already gives every size: remove --batch and --dim")
        profiles = []
        for number, text in enumerate(command.profiles):
            source = f"--profile number {number}"
            profiles.append(parse_profile(text, source))
            check_profile(profiles[-1], onnx, source)
        return tuple(profiles)
    batch = parse_sizes(command.batch, "--batch") if command.batch else None
    sizes = {name: parse_sizes(text, f"--dim {name}") for name, text in command.sizes.items()}
    return (derive_profile(onnx, batch=batch, sizes=sizes),)


def plan_build(command: BuildCommand) -> BuildRequest:
    """The request for it, all checked that can be without building.

    Raises ConfigError and InvalidArgumentError for what was asked, UnavailableError without the library.
    """
    onnx = read_onnx(command.onnx)
    profiles = plan_profiles(command, onnx)
    _check_output(command.output, onnx)
    flavour, _ = library_for(command.options.runtime)
    temporary = command.output.with_name(f".{command.output.name}.{os.getpid()}")
    return BuildRequest(str(command.onnx), str(temporary), flavour, profiles, command.options)


def _check_output(output: Path, onnx: OnnxFile) -> None:
    """Raises InvalidArgumentError where no engine can be written, or one would take the place of the model itself."""
    if not output.parent.is_dir():
        raise InvalidArgumentError(f"{output.parent}: expected a directory to write the engine to")
    if output.is_dir():
        raise InvalidArgumentError(f"{output}: expected a file for the engine, got a directory; name the file in it")
    if output.resolve() in {path.resolve() for path in (onnx.path, *onnx.external_files)}:
        raise InvalidArgumentError(
            f"{output}: expected a file for the engine, got one of the model's own, which the engine would replace"
        )


def build_plan(command: BuildCommand, request: BuildRequest, *, tell: Progress | None = None) -> BuiltPlan:
    """Build, and write the plan and its description beside it, each whole or not at all.

    Raises UnsupportedNodesError with the nodes that TensorRT cannot run, BuildFailedError with its reason.
    """
    temporary = Path(request.plan)
    try:
        result = build_engine(request, timeout_s=command.timeout_s, tell=tell)
        header = read_header(temporary)
        facts = {
            "onnx": command.onnx.name,
            "onnx_sha256": file_sha256(command.onnx),
            "options": command.options.to_json(),
            "duration_s": round(result.duration_s, 3),
            "peak_memory_bytes": result.peak_memory_bytes,
        }
        sidecar = write_sidecar(command.output, result.info, file_sha256(temporary), built_facts(header, facts))
        temporary.chmod(0o644)
        temporary.replace(command.output)
    finally:
        temporary.unlink(missing_ok=True)
    return BuiltPlan(command.output, sidecar, header, result)


def describe_plan(path: Path) -> dict[str, Any]:
    """A plan by its header and its sidecar, for `inspect`. Raises ServerError."""
    header = read_header(path)
    sidecar: Sidecar | None = read_sidecar(path)
    document: dict[str, Any] = {
        "kind": f"{header.flavour.title} engine",
        "bytes": header.size_bytes,
        "built_with": f"{header.flavour.title} {header.version_text}",
        "architectures": list(header.architectures),
    }
    if sidecar is None:
        document["note"] = (
            "an engine tells its inputs and outputs on a GPU only, and the .json file that modelserver build-engine "
            "writes beside it is not there"
        )
        return document
    if file_sha256(path) != sidecar.sha256:
        document["note"] = "the .json file beside it describes another engine: its checksum differs"
        return document
    return {**document, **describe_info(sidecar.info), "built": dict(sidecar.built)}


def describe_onnx(path: Path) -> dict[str, Any]:
    """An ONNX file by itself. Raises ServerError."""
    onnx = read_onnx(path)

    def listed(tensors: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor.name,
                "datatype": None if tensor.datatype is None else tensor.datatype.value,
                "shape": None if tensor.dims is None else ["?" if dim is None else dim for dim in tensor.dims],
            }
            for tensor in tensors
        ]

    return {
        "kind": "ONNX model",
        "bytes": path.stat().st_size,
        "opset": onnx.opset,
        "producer": onnx.producer,
        "external_files": [file.name for file in onnx.external_files],
        "inputs": listed(onnx.inputs),
        "outputs": listed(onnx.outputs),
    }


def describe_info(info: EngineInfo) -> dict[str, Any]:
    """Inputs, outputs and profiles of an engine, as JSON."""

    def listed(tensors: Sequence[IoTensor]) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": list(tensor.dims),
                **({"is_shape_tensor": True} if tensor.is_shape_tensor else {}),
            }
            for tensor in tensors
        ]

    return {
        "inputs": listed(info.inputs),
        "outputs": listed(info.outputs),
        "profiles": [profile_text(profile) for profile in info.profiles],
    }
